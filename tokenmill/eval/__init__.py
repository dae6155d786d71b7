"""The engine as a model of EleutherAI's lm-evaluation-harness: `TokenmillLM` in tokenmill.eval.model.

Releases of the harness after 0.4.13 find the model by this package's entry point. Earlier releases do not. For them,
`python -m tokenmill.eval` registers the model and then runs the harness's command `lm_eval`.
"""
