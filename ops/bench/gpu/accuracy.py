"""Whether the demo model's greedy answers depend on how many sequences run at once.

    python -m ops.bench.gpu.accuracy                   # all 2,000 rows at batch 1, 8, 64 and 256
    python -m ops.bench.gpu.accuracy --rows 300 --device cuda

In float32 every answer must be the same at every batch size, not only the share that is right: errors that
cancel out in the average are errors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch

from engine import Engine, EngineConfig, SamplingParams
from ops.bench.report import print_machine, print_table

DEMO = Path(__file__).resolve().parents[2] / "demo"
BATCHES = (1, 8, 64, 256)
LONGEST_ANSWER = 16  # tokens: a date and the end mark are 11
POOL_BYTES = 64 * 2**20

Answer = Callable[[Sequence[str], int], list[str]]  # texts, sequences at once -> answers


@dataclass(frozen=True)
class Rows:
    """Texts of the demo's file and what they should be answered with."""

    texts: list[str]
    truths: list[str]

    @classmethod
    def read(cls, count: int | None = None) -> Rows:
        """The first `count` rows, or all."""
        table = pq.read_table(DEMO / "dates.parquet", columns=["text", "truth"]).slice(0, count)
        return cls(table["text"].to_pylist(), table["truth"].to_pylist())


@dataclass(frozen=True)
class Outcome:
    """What one batch size gave: rows answered, the right share, rows answered unlike the largest size's."""

    batch: int
    num_rows: int
    accuracy: float
    different_rows: list[int]


def compare(
    answer: Answer,
    rows: Rows,
    batches: Sequence[int] = BATCHES,
    *,
    first_rows: Mapping[int, int] | None = None,
) -> list[Outcome]:
    """Answer the rows at each batch size, and hold the answers against those of the largest.

    first_rows: how many rows to answer at a batch size, of those that take longest; all at the others.
    """
    outcomes: list[Outcome] = []
    reference: list[str] = []
    for batch in sorted(batches, reverse=True):
        answers = answer(rows.texts[: (first_rows or {}).get(batch)], batch)
        reference = reference or answers
        right = sum(a == truth for a, truth in zip(answers, rows.truths, strict=False))
        different = [i for i, (a, b) in enumerate(zip(answers, reference, strict=False)) if a != b]
        outcomes.append(Outcome(batch, len(answers), right / len(answers), different))
    return outcomes[::-1]


def engine_answers(
    device: str = "auto", dtype: str = "float32", attention_backend: str = "auto"
) -> Answer:
    """Answers of the engine, a new one for each batch size."""

    def answer(texts: Sequence[str], batch: int) -> list[str]:
        config = EngineConfig(
            str(DEMO / "model"), dtype, device, max_num_seqs=batch, kv_cache_bytes=POOL_BYTES,
            attention_backend=attention_backend,
        )  # fmt: skip
        with Engine(config) as engine:
            prompts = [engine.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
            params = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.0)
            completions = engine.generate(prompts, params)
            assert engine.stats().max_running == min(batch, len(texts))
        return [completion.text for completion in completions]

    return answer


def main() -> int:
    """Compare all batch sizes; print a table. Returns 1 if any answer differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="the first so many rows; all without it")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", help="in bfloat16 logits move with the batch")
    parser.add_argument("--attention-backend", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a million parameters: a second thread costs more than it brings
    print_machine()
    answer = engine_answers(options.device, options.dtype, options.attention_backend)
    outcomes = compare(answer, Rows.read(options.rows), options.batches)
    print_table(
        ["sequences at once", "rows", "right", f"unlike those at {max(options.batches)}"],
        [[o.batch, o.num_rows, f"{o.accuracy:.2%}", len(o.different_rows)] for o in outcomes],
    )
    return int(any(o.different_rows for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
