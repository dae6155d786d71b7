"""Small files of each format with the same rows, and a run over them."""

import bz2
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from jobs.context import JobContext
from tests.jobs.answering import score_parquet

ROWS = [{"prompt": f"p{number}", "id": number, "half": number / 2} for number in range(23)]


def write_csv(path: Path, delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def compress(path: Path, suffix: str) -> Path:
    content = path.read_bytes()
    packed = {
        ".gz": lambda: gzip.compress(content[:100]) + gzip.compress(content[100:]),  # two members
        ".bz2": lambda: bz2.compress(content),
        ".zst": lambda: pa.compress(content, "zstd", asbytes=True),
    }[suffix]()
    path.unlink()
    target = path.with_name(path.name + suffix)
    target.write_bytes(packed)
    return target


def write_feather(path: Path) -> Path:
    feather.write_feather(pa.Table.from_pylist(ROWS), path, compression="lz4", chunksize=4)
    return path


def write_stream(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


def write_polars(path: Path) -> Path:
    pl.DataFrame(ROWS).write_ipc(path, compression="zstd")
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "in.csv": write_csv,
    "in.CSV": write_csv,
    "in.tsv": lambda path: write_csv(path, "\t"),
    "in.jsonl": write_jsonl,
    "in.ndjson": write_jsonl,
    "gz.jsonl": lambda path: compress(write_jsonl(path), ".gz"),
    "bz.jsonl": lambda path: compress(write_jsonl(path), ".bz2"),
    "zst.csv": lambda path: compress(write_csv(path), ".zst"),
    "in.feather": write_feather,
    "in.arrows": write_stream,
    "in.arrow": write_polars,
}


def score(context: JobContext, source: Any, folder: Path, **options: Any) -> dict[str, Any]:
    options = {"sampling": {"temperature": 0}, "rows_per_shard": 5, **options}
    source = [str(item) for item in source] if isinstance(source, list) else str(source)
    return score_parquet(context, source, str(folder / "out"), **options)


def read_rows(output: Path) -> list[dict[str, Any]]:
    return pq.read_table(output).to_pylist()
