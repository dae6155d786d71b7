"""Show that deterministic engines give each request the same bits alone as in any batch: tokens and log
probabilities.

    python -m ops.determinism                            # 256 requests in float32 and bfloat16
    python -m ops.determinism --requests 64 --model ops/out/llama --threads 2

Each request is computed alone first, nothing cached; then all of them at once in another order, in a pool so
small that sequences are preempted, in chunks of odd lengths, with cached prefixes, with overlap and without.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine import Completion, Engine, EngineConfig, EngineStats, SamplingParams, ScoringParams
from ops.bench.make import SHAPES, make_checkpoint

Request = tuple[list[int], SamplingParams | ScoringParams]
Bits = tuple[object, ...]  # all that a completion says, so that two are equal when all their bits are

MODEL_LEN = 384
MIXES: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 5}, {"temperature": 0.8, "logprobs": 0},
    {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5, "min_tokens": 4, "logprobs": 1},
    {"top_p": 0.9, "repetition_penalty": 1.4, "prompt_logprobs": 2}, {"n": 2, "logprobs": 3, "min_p": 0.05},
    {"temperature": 0.0, "logit_bias": {7: 3, 8: 2.5, 9: 2}, "prompt_logprobs": 0, "logprobs": 0},
]  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How all requests are computed at once. settings: of EngineConfig.

    shuffled: in another order.  urgent: while the others run, a fifth of them comes and thrusts some out.
    """

    name: str
    settings: Mapping[str, Any]
    shuffled: bool = True
    urgent: bool = False


def ways(num_requests: int, token_bytes: int) -> list[Way]:
    """token_bytes: of a token's keys and values; a tight pool holds a few of the requests."""
    tight = {"kv_cache_bytes": 2 * MODEL_LEN * token_bytes, "max_num_seqs": min(num_requests, 48)}
    roomy = {"kv_cache_bytes": max(MODEL_LEN, 12 * num_requests) * token_bytes, "block_size": 4}
    return [
        Way("one batch", {"async_scheduling": False}),
        Way("one batch, overlap, in order", {"async_scheduling": True}, shuffled=False),
        Way("preemption", {**roomy, "async_scheduling": False}, urgent=True),
        Way("preemption, overlap", {**roomy, "async_scheduling": True}, urgent=True),
        Way("chunks", {**tight, "max_num_batched_tokens": 61, "async_scheduling": False}, urgent=True),
        Way("chunks, overlap", {**tight, "max_num_batched_tokens": 117, "async_scheduling": True}),
        Way("no cached prefixes, blocks of 8", {"enable_prefix_caching": False, "block_size": 8}),
    ]


def make_requests(number: int, vocab_size: int, seed: int, max_tokens: int) -> list[Request]:
    """Prompts of 1 to 260 tokens, of which many begin alike, some of them scored alone; each with a seed."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (0, 30, 70, 190)]
    requests: list[Request] = []
    for i in range(number):
        tail = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 70))]
        prompt = prefixes[i % len(prefixes)] + tail
        values = MIXES[i % len(MIXES)]
        params = SamplingParams(max_tokens=rng.randrange(4, max_tokens + 1), seed=1000 + i, ignore_eos=True)
        if i % 7 == 6:
            continuations = [[tail[0], 9], [tail[0], 9, 11], [12, *tail]]
            requests.append((prompt, ScoringParams(continuations, score_end="auto")))
        else:
            requests.append((prompt, replace(params, **values)))
    return requests


def bits_of(completion: Completion) -> Bits:
    """Log probabilities as they are, whose floats compare by value."""
    return (
        completion.index,
        tuple(completion.token_ids),
        completion.text,
        completion.finish_reason,
        repr(completion.logprobs),
        repr(completion.prompt_logprobs),
        repr(completion.loglikelihoods),
    )


def run_all(
    config: EngineConfig, requests: Sequence[Request], order: Sequence[int], *, urgent: bool
) -> tuple[list[list[Bits]], EngineStats]:
    """Each request's completions, all in the engine at once; added in that order. urgent: as of a Way."""
    found: list[list[Bits]] = [[] for _ in requests]
    with Engine(config) as engine:
        done: list[Completion] = []
        first = order[: len(order) * 4 // 5] if urgent else order
        for i in first:
            engine.add(str(i), *requests[i], lane=int(urgent))
        for i in order[len(first) :]:
            done += engine.step()
            engine.add(str(i), *requests[i])
        while engine.has_unfinished:
            done += engine.step()
        for completion in done:
            found[int(completion.request_id)].append(bits_of(completion))
        return [sorted(each, key=lambda bits: str(bits[0])) for each in found], engine.stats()


def run_alone(config: EngineConfig, requests: Sequence[Request]) -> list[list[Bits]]:
    """Each request's completions, one request after another and nothing cached."""
    with Engine(replace(config, enable_prefix_caching=False)) as engine:
        found: list[list[Bits]] = []
        for prompt, params in requests:
            engine.add("alone", prompt, params)
            done: list[Bits] = []
            while engine.has_unfinished:
                done += map(bits_of, engine.step())
            found.append(sorted(done, key=lambda bits: str(bits[0])))
        return found


def differing(expected: Sequence[list[Bits]], found: Sequence[list[Bits]]) -> list[int]:
    """Which requests have other bits."""
    return [i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other]


def main() -> int:
    """Print a line for each way; 1 if any request differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; by default a random one in q54m's shape")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--default-mode", action="store_true", help="compare the default mode's bits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or make_checkpoint(Path(scratch), replace(SHAPES["q54m"], num_layers=4))
        failed = [
            compare(folder, dtype, options, deterministic=not options.default_mode)
            for dtype in options.dtypes
        ]
    return int(any(failed))


def compare(folder: Path, dtype: str, options: argparse.Namespace, *, deterministic: bool) -> bool:
    """Whether any request differs in one of the ways from what it is alone."""
    config = EngineConfig(
        str(folder),
        dtype=dtype,
        device="cpu",
        deterministic=deterministic,
        max_model_len=MODEL_LEN,
        kv_cache_bytes=2**30,
    )
    with Engine(config) as engine:
        vocab_size = engine._vocab_size
        token_bytes = 2**30 // (engine.stats().num_blocks * config.block_size)
    requests = make_requests(options.requests, vocab_size, options.seed, options.max_tokens)
    alone = run_alone(config, requests)
    failed = False
    for way in ways(len(requests), token_bytes):
        order = list(range(len(requests)))
        if way.shuffled:
            random.Random(options.seed).shuffle(order)
        found, stats = run_all(replace(config, **way.settings), requests, order, urgent=way.urgent)
        others = differing(alone, found)
        failed |= bool(others)
        print(
            f"{dtype}, {way.name}: {len(requests) - len(others)} of {len(requests)} requests bit-equal "
            f"({stats.max_running} at once, {stats.num_preemptions} preemptions, "
            f"{stats.cached_tokens} cached tokens){'; others: ' + str(others[:20]) if others else ''}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
