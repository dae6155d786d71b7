"""The engine as a model of EleutherAI's lm-evaluation-harness: `TokenmillLM` in tokenmill.eval.model.

Its releases after 0.4.13 find it by the entry point of this package. For others `python -m tokenmill.eval` is
their command `lm_eval`, with this model known to it.
"""
