"""A greedy run whose prompts repeat: how many of its rows are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ops.load.report import Report
from ops.load.site import MIB, site

TOKENS = 8
SLOTS = 64

#: A prompt is computed again where another shard is at it: no more of them than the engine holds.
MAX_TWICE = 4 * SLOTS


def repeats(
    num_rows: int = 200_000, distinct: int = 2772, workers: int = 1, memo_bytes: int | None = None
) -> Report:
    """Score rows with few distinct prompts in random order. memo_bytes: the worker's setting."""
    report = Report(f"repeats: {num_rows:,} rows, {distinct:,} distinct prompts, {workers} workers")
    with site() as place:
        source, output = place.folder / "in.parquet", place.folder / "out"
        prompts = _write(source, num_rows, distinct)
        place.queue("bulk").enqueue(
            "jobs.score_parquet",
            str(source),
            str(output),
            sampling={"max_tokens": TOKENS, "temperature": 0},
            job_timeout=-1,
        )
        settings = {} if memo_bytes is None else {"TOKENMILL_ANSWER_MEMO_BYTES": str(memo_bytes)}
        for number in range(workers):
            place.start(f"w{number}", settings=settings)
        place.wait((output / "_SUCCESS").exists, timeout_s=3600)
        last = place.stop().values()
        parts = pa.concat_tables(pq.read_table(part) for part in sorted(output.glob("part-*")))
        right = ["echo:" + prompt for prompt in prompts]
        report.equal("rows in order with their own answer", parts["completion"].to_pylist() == right, True)
        computed = sum(each["answered"] for each in last)
        report.tell("prompts computed ÷ rows", computed / num_rows)
        most = num_rows if memo_bytes == 0 else workers * (distinct + MAX_TWICE)
        report.at_most("prompts computed", computed, most)
        report.tell("peak RSS of a worker, MiB", max(each["peak_rss_bytes"] for each in last) / MIB)
    return report


def _write(path: Path, num_rows: int, distinct: int) -> list[str]:
    numbers: Any = np.random.default_rng(1).integers(0, distinct, num_rows)
    prompts = [f"classify sentence {number}" for number in numbers]
    pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=10_000)
    return prompts
