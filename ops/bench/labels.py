"""Labels of rows against generating one token for each: processor time, and the tokens that are computed.

    python -m ops.bench.labels                                              # the demo model, 10,000 rows
    python -m ops.bench.make --models q54m
    python -m ops.bench.labels --model ops/out/bench/q54m --rows 400

Rows of one template with texts of their own, in the order in which a run asks them. The ways take turns, each
with rows of its own. One thread, and the processor's time: neighbours slow down the clock and not the figure.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import Engine, EngineConfig, SamplingParams, ScoringParams
from ops.bench.report import print_machine
from ops.bench.table import print_table

MODEL = Path(__file__).parents[1] / "demo" / "model"
TEMPLATE = "Read the review and say what its writer thinks of the place.\nReview: {}\nSentiment: "
WORDS = (
    "the",
    "food",
    "was",
    "cold",
    "and",
    "we",
    "sat",
    "by",
    "door",
    "an",
    "hour",
    "soup",
    "good",
    "bread",
)
LABELS = {"of one token": ("a", "b", "c", "d"), "of several": ("positive", "negative", "neutral", "mixed")}
PENDING = 256
GENERATE = "one token generated"


@dataclass
class Taken:
    """Seconds of the processor, and tokens that were computed, of one way."""

    seconds: float
    num_tokens: int


def take(engine: Engine, prompts: Sequence[str], params: SamplingParams | ScoringParams) -> Taken:
    """Ask all prompts the same, as many at a time as the engine has room for."""
    before, start = engine.stats(), time.process_time()
    left = iter(enumerate(prompts))
    num_pending, exhausted = 0, False
    while not exhausted or num_pending:
        while num_pending < PENDING and not exhausted:
            item = next(left, None)
            if item is None:
                exhausted = True
            else:
                engine.add(str(item[0]), item[1], params)
                num_pending += 1
        for completion in engine.step():
            assert completion.error is None, completion.error
            num_pending -= 1
    after = engine.stats()
    num_tokens = after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens
    return Taken(time.process_time() - start, num_tokens)


def rows(seed: int, count: int) -> list[str]:
    """Prompts, sorted as a run's shards have them."""
    rng = random.Random(seed)
    return sorted(TEMPLATE.format(" ".join(rng.choices(WORDS, k=rng.randint(8, 30)))) for _ in range(count))


def main() -> None:
    """Measure the ways in turns; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seqs", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    generate = SamplingParams(max_tokens=1, temperature=0.0)
    ways = {GENERATE: generate} | {
        f"4 labels {name}": ScoringParams(labels, score_end="auto") for name, labels in LABELS.items()
    }
    taken: dict[str, list[Taken]] = {name: [] for name in ways}
    config = EngineConfig(args.model, max_num_seqs=args.seqs, kv_cache_bytes=2**29)
    with Engine(config) as engine:
        for params in ways.values():
            take(engine, rows(-1, 64), params)
        for repeat in range(args.repeats):
            for number, (name, params) in enumerate(ways.items()):
                taken[name].append(take(engine, rows(3 * repeat + number, args.rows), params))
    base = statistics.median(each.seconds for each in taken[GENERATE])
    print_table(
        ("way", "rows/s of processor time", "times one token", "tokens computed a row"),
        [
            (
                name,
                f"{args.rows / (seconds := statistics.median(each.seconds for each in found)):.0f}",
                f"{seconds / base:.2f}",
                f"{statistics.median(each.num_tokens for each in found) / args.rows:.2f}",
            )
            for name, found in taken.items()
        ],
    )


if __name__ == "__main__":
    main()
