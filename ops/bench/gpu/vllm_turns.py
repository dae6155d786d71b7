"""vLLM as a peer of `ops.bench.gpu.beside`: it takes turns, with the tokens' ids in and out.

usage: PYTHONPATH=SITE python -m ops.bench.gpu.vllm_turns --model FOLDER --turns --dtype bfloat16

Its settings are vLLM's own but for those that both engines are given: the cache's bytes, the sequences at once, the
longest sequence and the temperature.
"""

import argparse
import os
from functools import partial
from typing import Any

from ops.bench.workload import parse_options, run


def generate(
    llm: Any,
    prompts: list[list[int]],
    lengths: list[int],
    *,
    temperature: float,
    first_logprobs: int = 0,
) -> list[list[int]]:
    """Complete all prompts, each to its full length; return their tokens."""
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    if first_logprobs:
        params[0].logprobs = first_logprobs
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = llm.generate(asked, params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def main() -> None:
    """Measure once and print a RESULT line, or take turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kv-cache-bytes", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--memory-share", type=float, default=0.45, help="of the device, which it checks at start"
    )
    options = parse_options(parser)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # standard output is the protocol's
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm import LLM

    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        skip_tokenizer_init=True,
        generation_config="vllm",
        kv_cache_memory_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.memory_share,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
    )
    run(options, "vllm", partial(generate, llm, temperature=options.temperature))


if __name__ == "__main__":
    main()
