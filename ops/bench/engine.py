"""Tokens per second of `engine.generate` on one workload file, as the peers' runners print it.

usage: python -m ops.bench.engine --model FOLDER --workload W1.json [--threads 2] [--out out.json]

A workload is JSON: {"name": ..., "seqs": [{"prompt": [token ids], "max_tokens": n}, ...]}; every sequence is
decoded greedily to its full length. One small batch of other prompts runs before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams


def full_length(num_tokens: int) -> SamplingParams:
    """Greedy, to the last token asked for."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def measure(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Run all sequences at once; wall time in seconds, output tokens per second of wall time."""
    # Other token ids, so that no prefix of the counted run is cached.
    warm_up = [[(token + 5000) % 10_000 for token in prompt] for prompt in prompts[:4]]
    engine.generate(warm_up, full_length(8))
    started = time.perf_counter()
    completions = engine.generate(prompts, [full_length(n) for n in lengths])
    wall_s = time.perf_counter() - started
    outputs = [completion.token_ids for completion in completions]
    num_tokens = sum(map(len, outputs))
    return {
        "wall_s": round(wall_s, 3),
        "out_tokens": num_tokens,
        "tok_s": round(num_tokens / wall_s, 2),
        "short_seqs": sum(len(tokens) != n for tokens, n in zip(outputs, lengths, strict=True)),
        "outputs": outputs,
    }


def main() -> None:
    """Measure once and print a RESULT line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = json.loads(options.workload.read_text())
    prompts = [sequence["prompt"] for sequence in workload["seqs"]]
    lengths = [sequence["max_tokens"] for sequence in workload["seqs"]]
    config = EngineConfig(options.model, dtype=options.dtype, attention_backend=options.attention_backend)
    with Engine(config) as engine:
        result = {"peer": "tokenmill", "workload": workload["name"], **measure(engine, prompts, lengths)}
        result["stats"] = asdict(engine.stats())
    result["self_hwm_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    outputs = result.pop("outputs")
    if options.out is not None:
        options.out.write_text(json.dumps({**result, "outputs": outputs}))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
