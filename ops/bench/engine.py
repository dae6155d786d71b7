"""Tokens per second of `engine.generate` on one workload file, as the peers' runners print it.

usage: python -m ops.bench.engine --model FOLDER --workload W1.json [--threads 2] [--out out.json]
"""

import argparse
import gc
from dataclasses import asdict, replace
from functools import partial

import torch

from engine import Engine, EngineConfig, SamplingParams
from ops.bench.workload import parse_options, run


def generate(
    engine: Engine,
    prompts: list[list[int]],
    lengths: list[int],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    first_logprobs: int = 0,
) -> list[list[int]]:
    """Complete all prompts, each to its full length; return their tokens."""
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, top_p=top_p, ignore_eos=True)
        for n in lengths
    ]
    if first_logprobs:
        params[0] = replace(params[0], logprobs=first_logprobs)
    return [completion.token_ids for completion in engine.generate(prompts, params)]


def main() -> None:
    """Measure once and print a RESULT line, or take turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kv-cache-bytes", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parse_options(parser)
    torch.set_num_threads(options.threads)
    config = EngineConfig(
        options.model,
        dtype=options.dtype,
        kv_cache_bytes=options.kv_cache_bytes,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kernel_check="refuse",  # "warn" would replace a faulty kernel by torch's attention, and measure that
    )
    with Engine(config) as engine:
        gc.collect()
        gc.freeze()  # as a worker does
        run(
            options,
            "tokenmill",
            partial(generate, engine, temperature=options.temperature),
            lambda: {"stats": asdict(engine.stats())},
        )


if __name__ == "__main__":
    main()
