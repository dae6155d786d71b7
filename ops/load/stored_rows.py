"""Parquet runs of growing size from and to an object store: flat worker memory, every row once."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ops.load.report import Report
from ops.load.rows import MAX_RSS_RATIO, write_rows
from ops.load.site import MIB, Site, site, unended
from tests.jobs.s3_server import BUCKET, S3, running_s3

SIZES = (10_000, 1_000_000)


def stored_rows(
    sizes: Sequence[int] = SIZES, row_group_rows: int = 10_000, rows_per_shard: int = 1000, workers: int = 1
) -> Report:
    """Score a file of each size in a store that moto serves; compare the largest with the smallest."""
    report = Report(f"rows in a store: {rows_per_shard:,} a shard, {workers} workers")
    peaks = []
    for size in sizes:
        with site() as place, running_s3() as s3:
            peaks.append(_score(place, s3, report, size, row_group_rows, rows_per_shard, workers))
    report.at_most("peak RSS, largest ÷ smallest file", peaks[-1] / peaks[0], MAX_RSS_RATIO, measured=True)
    return report


def _score(
    place: Site, s3: S3, report: Report, size: int, row_group_rows: int, rows_per_shard: int, workers: int
) -> float:
    """Run one file; return the peak RSS of the worker that took most in MiB."""
    source = place.folder / "in.parquet"
    write_rows(source, size, row_group_rows)
    with source.open("rb") as file:
        s3.client.upload_fileobj(file, BUCKET, "in.parquet")
    place.queue("bulk").enqueue(
        "jobs.score_parquet",
        f"s3://{BUCKET}/in.parquet",
        f"s3://{BUCKET}/out",
        sampling={"max_tokens": 1},
        rows_per_shard=rows_per_shard,
        job_timeout=-1,
    )
    settings = {"TOKENMILL_DATA_ROOTS": f"s3://{BUCKET}", **s3.environment()}
    for number in range(workers):
        place.start(f"w{number}", settings=settings)
    place.wait_until_ready()
    started = time.monotonic()
    place.wait(lambda: s3.has("out/_SUCCESS"), timeout_s=7200)
    seconds = time.monotonic() - started
    place.wait(lambda: unended(place, "bulk") == 0)
    last = place.stop()
    who, seen = f"{size:,} rows: ", _count_rows(s3, size)
    report.equal(f"{who}rows missing or doubled", int((seen != 1).sum()), 0)
    report.equal(f"{who}rows computed", sum(each["answered"] for each in last.values()), size)
    report.equal(f"{who}temporary objects left", len(s3.names("out/_tmp")), 0)
    report.equal(f"{who}uploads left", len(s3.uploads()), 0)
    report.tell(f"{who}seconds", seconds)
    report.tell(f"{who}rows/s", size / seconds)
    peak: float = max(each["peak_rss_bytes"] for each in last.values()) / MIB
    report.tell(f"{who}peak RSS of a worker, MiB", peak)
    return peak


def _count_rows(s3: S3, size: int) -> Any:
    """How often each id is in the parts with its right answer: [size] uint8."""
    seen = np.zeros(size, dtype=np.uint8)
    for name in s3.names("out/part-"):
        table = pq.read_table(io.BytesIO(s3.get(name)), columns=["id", "prompt", "completion"])
        right = pa.compute.equal(
            table["completion"], pa.compute.binary_join_element_wise("echo:", table["prompt"], "")
        )
        np.add.at(seen, table.filter(right)["id"].to_numpy(), 1)
    return seen
