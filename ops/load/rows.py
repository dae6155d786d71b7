"""Parquet runs of growing size: flat worker memory, rows/s that do not fall, everything cleaned up."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis

from jobs.runs.names import PLAN
from jobs.runs.snapshot import read_snapshot
from ops.load.report import Report
from ops.load.site import MIB, Site, site, unended

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
CHUNK_ROWS = 100_000
MAX_RSS_RATIO = 1.1
MIN_SPEED_RATIO = 0.6


def rows(
    sizes: Sequence[int] = SIZES, row_group_rows: int = 10_000, rows_per_shard: int = 1000, workers: int = 1
) -> Report:
    """Score a file of each size; compare the largest with the smallest."""
    report = Report(f"rows: {rows_per_shard:,} a shard, row groups of {row_group_rows:,}, {workers} workers")
    peaks, speeds = [], []
    for size in sizes:
        with site() as place:
            peak, speed = _score(place, report, size, row_group_rows, rows_per_shard, workers)
        peaks.append(peak)
        speeds.append(speed)
    report.at_most("peak RSS, largest ÷ smallest file", peaks[-1] / peaks[0], MAX_RSS_RATIO, measured=True)
    report.at_least("rows/s, largest file ÷ best", speeds[-1] / max(speeds), MIN_SPEED_RATIO, measured=True)
    return report


def _score(
    place: Site, report: Report, size: int, row_group_rows: int, rows_per_shard: int, workers: int
) -> tuple[float, float]:
    """Run one file; return the peak RSS of the worker that took most in MiB, and rows per second."""
    source, output = place.folder / "in.parquet", place.folder / "out"
    write_rows(source, size, row_group_rows)
    before = place.redis.info("memory")["used_memory"]
    place.queue("bulk").enqueue(
        "jobs.score_parquet",
        str(source),
        str(output),
        sampling={"max_tokens": 1},
        rows_per_shard=rows_per_shard,
        job_timeout=-1,
    )
    for number in range(workers):
        place.start(f"w{number}")
    place.wait_until_ready()
    started = time.monotonic()
    place.wait((output / "_SUCCESS").exists, timeout_s=7200)
    seconds = time.monotonic() - started
    place.wait(lambda: unended(place, "bulk") == 0)
    status_s = _status_s(place.redis, output)
    last = place.stop()
    who, shards = f"{size:,} rows: ", len(json.loads((output / "_plan.json").read_text())["shards"])
    seen = count_rows(output, size)
    report.equal(f"{who}rows missing or doubled", int((seen != 1).sum()), 0)
    report.equal(f"{who}rows computed", sum(each["answered"] for each in last.values()), size)
    report.equal(f"{who}parts", len(list(output.glob("part-*"))), shards)
    beside = len(list(output.iterdir())) - shards
    report.equal(f"{who}files beside them", beside, 4)  # plan, manifest, report, _SUCCESS
    report.equal(f"{who}Redis keys that never expire", len(place.eternal_keys()), 0)
    report.tell(f"{who}Redis bytes per shard", (place.redis.info("memory")["used_memory"] - before) / shards)
    report.tell(f"{who}seconds", seconds)
    report.tell(f"{who}rows/s", size / seconds)
    report.tell(f"{who}seconds of a look at its status", status_s)
    written = sum(file.stat().st_size for file in output.iterdir())
    report.tell(f"{who}bytes written ÷ read", written / source.stat().st_size)
    peak = max(each["peak_rss_bytes"] for each in last.values()) / MIB
    report.tell(f"{who}peak RSS of a worker, MiB", peak)
    return peak, size / seconds


def write_rows(path: Path, size: int, row_group_rows: int) -> None:
    """Write `size` rows of an id and a prompt of its own."""
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, size, max(CHUNK_ROWS, row_group_rows)):
            numbers = range(start, min(size, start + max(CHUNK_ROWS, row_group_rows)))
            prompts = [f"row {number} of a table with some text in it" for number in numbers]
            table = pa.table([pa.array(numbers), pa.array(prompts)], schema=schema)
            writer.write_table(table, row_group_size=row_group_rows)


def count_rows(output: Path, size: int) -> Any:
    """How often each id is in the parts with its right answer: [size] uint8."""
    seen = np.zeros(size, dtype=np.uint8)
    for part in sorted(output.glob("part-*")):
        table = pq.read_table(part, columns=["id", "prompt", "completion"])
        right = pa.compute.equal(
            table["completion"], pa.compute.binary_join_element_wise("echo:", table["prompt"], "")
        )
        np.add.at(seen, table.filter(right)["id"].to_numpy(), 1)
    return seen


def _status_s(redis: Redis, output: Path) -> float:
    """Seconds that `tokenmill status` looks at Redis."""
    run = json.loads((output / PLAN).read_text())["run"]
    started = time.monotonic()
    assert read_snapshot(redis, run).finished, output
    return time.monotonic() - started
