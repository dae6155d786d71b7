"""Whatever objects and fields a file of lines holds, they come back, in shards of any size."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.parquet.formats import line_scan
from jobs.parquet.formats.line_scan import scan_lines
from jobs.parquet.row_reader import RowReader, Table
from jobs.parquet.storage import Storage
from jobs.runs.plans.plan import cut_shards

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=8))
def test_any_objects_come_back_as_they_are_or_as_their_json(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_all(path, "jsonl", 3)
    for row, back in zip(rows, found, strict=True):
        for name in back.keys() - row.keys():
            assert back[name] is None
        for name, value in row.items():
            assert same(value, back[name]), (value, back[name])


def same(value: Any, back: Any) -> bool:
    """Whether a value is what came back: itself, its JSON, or itself with nulls for what others have."""
    if isinstance(value, dict) and isinstance(back, dict):
        return all(same(value.get(name), back[name]) for name in back) and value.keys() <= back.keys()
    if isinstance(value, list) and isinstance(back, list):
        return len(value) == len(back) and all(map(same, value, back))
    if value is None or back is None:
        return value is back
    return value == back or back == json.dumps(value, ensure_ascii=False)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=8), rows_per_shard=st.integers(1, 4))
def test_any_fields_come_back_in_shards_of_any_size(
    tmp_path: Path, rows: list[tuple[str, str]], rows_per_shard: int
) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("t", "u"), *rows])
    path = tmp_path / "in.csv"
    path.write_bytes(out.getvalue().encode())
    found = read_all(path, "csv", rows_per_shard)
    assert [tuple("" if row[name] is None else plain(row[name]) for name in "tu") for row in found] == [
        tuple(map(normal, row)) for row in rows
    ]


def plain(value: Any) -> str:
    return normal(str(value))


def normal(text: str) -> str:
    """Numbers and truth values are compared by value."""
    try:
        return repr(float(text)) if text.strip("+ _") == text and text.isascii() else text
    except ValueError:
        return text.lower() if text.lower() in ("true", "false") else text


def read_all(path: Path, input_format: str, rows_per_shard: int) -> list[dict[str, Any]]:
    storage = Storage([str(path.parent)])
    block_bytes, line_scan.BLOCK_BYTES = line_scan.BLOCK_BYTES, 20
    try:
        found = scan_lines(storage, str(path), input_format, lambda: None)
    finally:
        line_scan.BLOCK_BYTES = block_bytes
    table = Table(input_format, tuple(found.kinds.items()), tuple(found.blocks), sum(found.rows))
    rows: list[dict[str, Any]] = []
    for shard in cut_shards([found.rows], rows_per_shard):
        reader = RowReader(storage, str(path), shard, table=table)
        for batch in reader.read(shard):
            rows += batch.select(list(found.kinds)).to_pylist() if found.kinds else [{}] * batch.num_rows
        reader.close()
    return rows
