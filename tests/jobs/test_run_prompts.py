"""What becomes a prompt of a row: a column, a template, a chat; a row that gives none costs itself alone."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
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
from jobs.errors import InvalidJob, OutputHoldsAnotherRun, WrongColumnType
from jobs.parquet.row_values import MAX_NESTED_VALUES, RowProblem, row_values
from jobs.tasks import Request
from tests.jobs.answering import (
    FakeCompletion,
    queued_jobs,
    refuse,
    shout,
)
from tests.jobs.conftest import Invoke
from tests.jobs.input_files import read_rows, write_prompts
from tests.jobs.runs import Runs

GREEDY = {"temperature": 0}


def test_bad_rows_get_an_error_and_the_rest_goes_on(runs: Runs, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", None, "", "long", "b", "x" * (1 << 20) + "y"])
    runs.plan(source)
    runs.work(
        answer=lambda request: refuse("prompt too long") if request.prompt == "long" else shout(request),
    )
    rows = runs.rows()
    assert [row["completion"] for row in rows] == ["A", None, None, None, "B", None]
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "error", "error", "stop", "error"]
    errors = [row["error"] for row in rows]
    assert errors[:5] == [None, "prompt is null", "prompt is empty", "prompt too long", None]
    assert "limit" in errors[5]
    assert runs.manifest["errors"] == 4


def test_a_text_that_is_not_utf8_is_its_rows_error(runs: Runs) -> None:
    broken = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": broken}), runs.source)
    runs.plan()
    runs.work()
    table = pq.read_table(runs.output)
    assert table["completion"].to_pylist() == ["FINE", None]
    assert "UTF-8" in table["error"].to_pylist()[1]
    assert table["prompt"].cast(pa.binary()).to_pylist() == [b"fine", b"\xff\xfe"]


def test_a_value_that_python_cannot_hold_is_its_rows_error(runs: Runs, tmp_path: Path) -> None:
    days = pa.array([0, 10**8, None], pa.date32())
    zoned = pa.array([1, 1, 1], pa.timestamp("us", tz="Mars/Olympus"))
    pq.write_table(pa.table({"day": days, "zoned": zoned, "id": [0, 1, 2]}), runs.source)
    for output, template in (("days", "on {day}"), ("zoned", "at {zoned}")):
        runs.plan(str(tmp_path / "in.parquet"), str(tmp_path / output), template=template)
        runs.work()
    table = pq.read_table(tmp_path / "days")
    assert table["completion"].to_pylist() == ["ON 1970-01-01", None, None]
    assert "date32" in table["error"].to_pylist()[1]
    assert table["error"].to_pylist()[2] == "column 'day' is null"
    assert table["day"].equals(pq.read_table(tmp_path / "in.parquet")["day"])
    assert all("timestamp" in error for error in pq.read_table(tmp_path / "zoned")["error"].to_pylist())


def test_templates_fill_in_columns_and_leave_the_datas_braces_alone(runs: Runs, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["{id}", None], price=[1.5, 2.5])
    runs.plan(source, template="{{{id}}} {prompt} costs {price}")
    runs.work()
    rows = runs.rows()
    assert rows[0]["completion"] == "{0} {ID} COSTS 1.5"
    assert rows[1]["error"] == "column 'prompt' is null"


def test_a_template_of_messages_makes_a_chat(runs: Runs, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["hi"])
    template = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "<{prompt}>"}]
    runs.plan(source, template=template)
    seen: list[Request] = []
    runs.work(answer=lambda request: seen.append(request) or FakeCompletion("ok"))
    (request,) = seen
    assert request.prompt is None
    assert request.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "<hi>"},
    ]


def test_messages_may_be_structs_or_json(runs: Runs, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    table = pa.table(
        {
            "structs": [chat, None, [], [{"role": "user", "content": None}]],
            "texts": [json.dumps(chat), "{", '"x"', "[" * 100_000],
        }
    )
    pq.write_table(table, runs.source)
    for column in ("structs", "texts"):
        output = tmp_path / f"out-{column}"
        runs.plan(str(tmp_path / "in.parquet"), str(output), messages_column=column)
        runs.work(answer=lambda request: FakeCompletion(json.dumps(request.messages)))
        rows = read_rows(output)
        assert json.loads(rows[0]["completion"]) == chat
        assert [row["completion"] for row in rows[1:]] == [None] * 3
        assert all(row["error"] for row in rows[1:])


Prompts = Callable[..., list[str | None]]


@pytest.fixture
def prompts(runs: Runs, tmp_path: Path) -> Prompts:
    """Returns the prompt of each row of in.parquet, or its error."""

    def run(template: Any, **arguments: Any) -> list[str]:
        def answer(request: Any) -> FakeCompletion:
            return FakeCompletion(request.prompt or json.dumps(request.messages, ensure_ascii=False))

        source, out = str(tmp_path / "in.parquet"), str(runs.output)
        runs.plan(source, out, template=template, **arguments)
        runs.work(answer=answer)
        rows = pq.read_table(out).to_pylist()
        return [row["completion"] if row["error"] is None else row["error"] for row in rows]

    return run


def test_a_default_stands_for_null_and_only_where_it_is_given(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", None, "", None], "b": [1, None, 2, 3]}), tmp_path / "in.parquet")
    found = prompts("{a}-{b}", defaults={"a": "{b}"})
    assert found == ["x-1", "column 'b' is null", "-2", "{b}-3"], "a default is text, no template"


def test_defaults_that_stand_for_nothing_are_refused(prompts: Prompts, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"], "prompt": ["y"]}), tmp_path / "in.parquet")
    with pytest.raises(InvalidJob, match="'b' has a default"):
        prompts("{a}", defaults={"b": ""})
    with pytest.raises(InvalidJob, match="default of column 'a' is int"):
        prompts("{a}", defaults={"a": 1})
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


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(), lambda v: st.lists(v))
)
def test_json_reads_back_but_for_numbers_that_it_has_not(value: Any) -> None:
    def read(each: Any) -> Any:
        if isinstance(each, list):
            return [read(item) for item in each]
        return None if isinstance(each, float) and not math.isfinite(each) else each

    assert json.loads(to_json([value])) == read([value])


def test_the_command_line_takes_defaults(invoke: Invoke, redis: Redis, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet", tmp_path / "out", "--template", "{a}")
    assert "has a default" in invoke(*submit, "--default", "b=").output
    assert "COLUMN=TEXT" in invoke(*submit, "--default", "b").output
    result = invoke(*submit, "--default", "a=not = known")
    assert result.exit_code == 0, result.output
    assert queued_jobs(redis)[0].kwargs["defaults"] == {"a": "not = known"}
