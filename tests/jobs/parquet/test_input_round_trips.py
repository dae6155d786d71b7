"""Whatever objects and fields a file of lines holds, they come back from what is made of it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import scan
from jobs.parquet.tables.columns import PROBLEM
from jobs.parquet.tables.table_reading import open_table

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=8))
def test_any_objects_come_back_as_they_are_or_as_their_json(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_all(path, "jsonl")
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
@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=8))
def test_any_fields_come_back(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("t", "u"), *rows])
    path = tmp_path / "in.csv"
    path.write_bytes(out.getvalue().encode())
    found = read_all(path, "csv")
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


def read_all(path: Path, input_format: str) -> list[dict[str, Any]]:
    storage = Storage([str(path.parent)])
    kinds = scan(storage, str(path), input_format).kinds
    with open_table(storage, str(path), input_format) as ask:
        question = {"kinds": list(kinds.items()), "rows": None}
        pieces = [body for _, body in ask("jobs.parquet.formats.converter:convert", question)]
    found = pq.read_table(io.BytesIO(b"".join(pieces)))
    return found.drop([PROBLEM]).to_pylist() if kinds else [{}] * found.num_rows
