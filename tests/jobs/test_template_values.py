"""What a template makes of nulls, and of lists, structs and maps."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from jobs.common.json_text import to_json
from jobs.context import JobContext
from jobs.errors import InvalidJob, OutputHoldsAnotherRun, WrongColumnType
from jobs.parquet.nested_values import num_values
from jobs.parquet.row_values import MAX_NESTED_VALUES, RowProblem, row_values
from tests.jobs.answering import FakeCompletion, queued_jobs, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]
Prompts = Callable[..., list[str | None]]
_MAPS = pa.map_(pa.string(), pa.list_(pa.int8()))


@pytest.fixture
def prompts(redis: Redis, make_context: MakeContext, tmp_path: Path) -> Prompts:
    """Returns the prompt of each row of in.parquet, or its error."""

    def run(template: Any, **arguments: Any) -> list[str]:
        def answer(request: Any) -> FakeCompletion:
            return FakeCompletion(request.prompt or json.dumps(request.messages, ensure_ascii=False))

        source, out = str(tmp_path / "in.parquet"), str(tmp_path / "out")
        score_parquet(make_context(), source, out, template=template, **arguments)
        work_off(redis, make_context, answer=answer)
        rows = pq.read_table(out).to_pylist()
        return [row["completion"] if row["error"] is None else row["error"] for row in rows]

    return run


def test_a_default_stands_for_null_and_only_where_it_is_given(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", None, "", None], "b": [1, None, 2, 3]}), tmp_path / "in.parquet")
    found = prompts("{a}-{b}", defaults={"a": "{b}"})
    assert found == ["x-1", "column 'b' is null", "-2", "{b}-3"], "a default is text, no template"


def test_an_empty_default_leaves_null_out(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", None]}), tmp_path / "in.parquet")
    template = [{"role": "user", "content": "<{a}>"}]
    assert [json.loads(text)[0]["content"] for text in prompts(template, defaults={"a": ""})] == ["<x>", "<>"]


def test_defaults_that_stand_for_nothing_are_refused(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"], "prompt": ["y"]}), tmp_path / "in.parquet")
    with pytest.raises(InvalidJob, match="'b' has a default"):
        prompts("{a}", defaults={"b": ""})
    with pytest.raises(InvalidJob, match="give a template too"):
        prompts(None, defaults={"prompt": ""})
    with pytest.raises(InvalidJob, match="default of column 'a' is int"):
        prompts("{a}", defaults={"a": 1})
    with pytest.raises(InvalidJob, match="expected a mapping"):
        prompts("{a}", defaults="x")
    prompts("{a}", defaults={})
    with pytest.raises(OutputHoldsAnotherRun, match="defaults"):
        prompts("{a}", defaults={"a": "x"})


def test_lists_structs_and_maps_are_json(prompts: Prompts, tmp_path: Path) -> None:
    kind = pa.struct(
        {"when": pa.date32(), "ids": pa.list_(pa.int8()), "tags": pa.map_(pa.string(), pa.bool_())}
    )
    table = pa.table(
        {
            "s": pa.array(
                [
                    {
                        "when": datetime.date(2024, 2, 29),
                        "ids": [1, None],
                        "tags": [("ä", True), ("ä", False)],
                    },
                    {"when": None, "ids": [], "tags": []},
                    None,
                ],
                kind,
            ),
            "m": pa.array([[(1, 0.5)], [], [(2, math.nan)]], pa.map_(pa.int8(), pa.float64())),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    assert prompts("{m} {s}", defaults={"s": "-"}) == [
        '{"1": 0.5} {"when": "2024-02-29", "ids": [1, null], "tags": {"ä": false}}',
        '{} {"when": null, "ids": [], "tags": {}}',
        '{"2": null} -',
    ]


def test_nested_columns_of_pandas_polars_and_duckdb(prompts: Prompts, tmp_path: Path) -> None:
    path, out = tmp_path / "in.parquet", tmp_path / "out"
    pd.DataFrame({"x": [{"a": [1, 2], "b": None}, {"a": None, "b": "q"}]}).to_parquet(path)
    expected = ['{"a": [1, 2], "b": null}', '{"a": null, "b": "q"}']
    assert prompts("{x}") == expected
    out.rename(tmp_path / "pandas")
    pl.DataFrame({"x": [{"a": [1, 2], "b": None}, {"a": None, "b": "q"}]}).write_parquet(path)
    assert prompts("{x}") == expected
    out.rename(tmp_path / "polars")
    record = "{'a': 1.25, 'm': map {'k': [timestamp '2024-01-01 10:00:00']}}"
    duckdb.sql(f"copy (select {record} as x) to '{path}'")
    assert prompts("{x}") == ['{"a": 1.25, "m": {"k": ["2024-01-01T10:00:00"]}}']


def test_bytes_inside_of_a_column_are_refused_and_named(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"s": [[{"raw": b"x"}]]}), tmp_path / "in.parquet")
    with pytest.raises(WrongColumnType, match="'s' is of type list"):
        prompts("{s}")


def test_a_row_with_too_many_values_is_its_own_error_wherever_it_stands() -> None:
    kind = pa.list_(pa.struct({"a": pa.null()}))
    small, large = [{"a": None}], [{"a": None}] * MAX_NESTED_VALUES
    column = pa.array([small, large, None, small], kind)
    found = list(row_values("c", column.slice(0, 4)))
    assert (found[0], found[2], found[3]) == (small, None, small)
    assert isinstance(found[1], RowProblem)
    assert "column 'c' has a value of" in str(found[1])


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), max_size=8), st.data())
def test_values_are_counted_in_slices_as_in_whole_columns(rows: list[Any], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    part = rows[start : data.draw(st.integers(start, len(rows)))]
    expected = sum(len(row) + sum(map(len, row)) for row in part)
    column = pa.array(rows, pa.list_(pa.list_(pa.int8())))
    assert num_values(column.slice(start, len(part))) == expected
    pairs = pa.array([[(str(n), inner) for n, inner in enumerate(row)] for row in rows], _MAPS)
    expected = sum(2 * len(row) + sum(map(len, row)) for row in part)
    assert num_values(pairs.slice(start, len(part))) == expected


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(), lambda v: st.lists(v))
)
def test_json_reads_back_but_for_numbers_that_it_has_not(value: Any) -> None:
    def read(each: Any) -> Any:
        if isinstance(each, list):
            return [read(item) for item in each]
        return None if isinstance(each, float) and not math.isfinite(each) else each

    assert json.loads(to_json([value])) == read([value])


def test_decimals_are_numbers_where_a_float_is_the_same() -> None:
    assert to_json([Decimal("1.10"), Decimal("0.1234567890123456789"), Decimal("NaN")]) == (
        '[1.1, "0.1234567890123456789", "NaN"]'
    )


def test_the_command_line_takes_defaults(invoke: Invoke, redis: Redis, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet", tmp_path / "out", "--template", "{a}")
    assert "has a default" in invoke(*submit, "--default", "b=").output
    assert "COLUMN=TEXT" in invoke(*submit, "--default", "b").output
    result = invoke(*submit, "--default", "a=not = known")
    assert result.exit_code == 0, result.output
    assert queued_jobs(redis)[0].kwargs["defaults"] == {"a": "not = known"}
