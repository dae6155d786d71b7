"""What becomes a prompt of a row: a column, a template, a chat; a row that gives none costs itself alone."""

import datetime
import inspect
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from jobs.common.display import to_json
from jobs.errors import InvalidJob, WrongColumnType
from jobs.parquet.tables.columns import MAX_NESTED_VALUES, RowProblem, row_values
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, refuse, score_parquet, shout
from tests.jobs.local_runs import Runs

Prompts = Callable[..., list[str]]


@pytest.fixture
def prompts(runs: Runs) -> Callable[..., list[str]]:
    """Returns the prompt of each row of in.parquet, or its error."""

    def run(template: Any = None, **arguments: Any) -> list[str]:
        def answer(request: Request) -> FakeCompletion:
            asked = request.prompt or json.dumps(request.messages, ensure_ascii=False)
            return FakeCompletion(str(asked))

        runs.output = runs.output.with_name(f"{runs.output.name}+")
        table = runs.score(template=template, answer=answer, **arguments)
        errors = zip(table["completion"].to_pylist(), table["error"].to_pylist(), strict=True)
        return [text if error is None else error for text, error in errors]

    return run


def test_bad_rows_get_an_error_and_the_rest_goes_on(runs: Runs) -> None:
    def answer(request: Request) -> FakeCompletion:
        return refuse("prompt too long") if request.prompt == "long" else shout(request)

    runs.write(["a", None, "", "long", "b", "x" * (1 << 20) + "y"])
    rows = runs.score(answer=answer).to_pylist()
    assert [row["completion"] for row in rows] == ["A", None, None, None, "B", None]
    assert [row["finish_reason"] for row in rows] == [
        "stop",
        "error",
        "error",
        "error",
        "stop",
        "error",
    ]
    errors = [row["error"] for row in rows]
    assert errors[:5] == [None, "prompt is null", "prompt is empty", "prompt too long", None]
    assert "limit" in errors[5]
    assert runs.manifest["errors"] == 4


def test_what_is_asked_may_stand_in_its_place_behind_input_and_output(runs: Runs) -> None:
    given = (str(runs.write(["a"])), str(runs.output), None, None, "{id}: {prompt}")
    inspect.signature(jobs.score_parquet).bind(*given)
    run = score_parquet(runs.context(), *given)["run"]
    assert runs.plan(template="{id}: {prompt}")["run"] == run


def test_a_text_that_is_not_utf8_is_its_rows_error(runs: Runs) -> None:
    broken = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    runs.write(broken)
    table = runs.score()
    assert table["completion"].to_pylist() == ["FINE", None]
    assert "UTF-8" in table["error"].to_pylist()[1]
    assert table["prompt"].cast(pa.binary()).to_pylist() == [b"fine", b"\xff\xfe"]


def test_a_value_that_python_cannot_hold_is_its_rows_error(runs: Runs, prompts: Prompts) -> None:
    days = pa.array([0, 10**8, None], pa.date32())
    zoned = pa.array([1, 1, 1], pa.timestamp("us", tz="Mars/Olympus"))
    pq.write_table(pa.table({"day": days, "zoned": zoned}), runs.source)
    first, second, third = prompts("on {day}")
    assert (first, third) == ("on 1970-01-01", "column 'day' is null")
    assert "date32" in second
    assert pq.read_table(runs.output)["day"].equals(pa.chunked_array([days]))
    assert all("timestamp" in error for error in prompts("at {zoned}"))


def test_templates_fill_in_columns_and_leave_the_datas_braces_alone(
    runs: Runs, prompts: Prompts
) -> None:
    runs.write(["{id}", None], price=[1.5, 2.5])
    assert prompts("{{{id}}} {prompt} costs {price}") == [
        "{0} {id} costs 1.5",
        "column 'prompt' is null",
    ]


def test_a_template_of_messages_makes_a_chat(runs: Runs, prompts: Prompts) -> None:
    runs.write(["hi"])
    system = {"role": "system", "content": "Be kind."}
    (chat,) = prompts([system, {"role": "user", "content": "<{prompt}>"}])
    assert json.loads(chat) == [system, {"role": "user", "content": "<hi>"}]


def test_messages_may_be_structs_or_json(runs: Runs, prompts: Prompts) -> None:
    chat = [{"role": "user", "content": "hi"}]
    structs = [chat, None, [], [{"role": "user", "content": None}]]
    texts = [json.dumps(chat), "{", '"x"', "[" * 100_000]
    pq.write_table(pa.table({"structs": structs, "texts": texts}), runs.source)
    for column in ("structs", "texts"):
        first, *_ = prompts(messages_column=column)
        assert json.loads(first) == chat
        assert [row["completion"] for row in runs.rows()[1:]] == [None] * 3


def test_a_default_stands_for_null_and_only_where_it_is_given(prompts: Prompts, runs: Runs) -> None:
    pq.write_table(pa.table({"a": ["x", None, "", None], "b": [1, None, 2, 3]}), runs.source)
    found = prompts("{a}-{b}", defaults={"a": "{b}"})
    assert found == ["x-1", "column 'b' is null", "-2", "{b}-3"], "a default is text, no template"


def test_defaults_that_stand_for_nothing_are_refused(prompts: Prompts, runs: Runs) -> None:
    pq.write_table(pa.table({"a": ["x"], "prompt": ["y"]}), runs.source)
    with pytest.raises(InvalidJob, match="'b' has a default"):
        prompts("{a}", defaults={"b": ""})
    with pytest.raises(InvalidJob, match="default of column 'a' is int"):
        prompts("{a}", defaults={"a": 1})


def test_lists_structs_and_maps_are_json(prompts: Prompts, runs: Runs) -> None:
    tags = pa.map_(pa.string(), pa.bool_())
    kind = pa.struct({"when": pa.date32(), "ids": pa.list_(pa.int8()), "tags": tags})
    full = {
        "when": datetime.date(2024, 2, 29),
        "ids": [1, None],
        "tags": [("ä", True), ("ä", False)],
    }
    structs = pa.array([full, {"when": None, "ids": [], "tags": []}, None], kind)
    maps = pa.array([[(1, 0.5)], [], [(2, math.nan)]], pa.map_(pa.int8(), pa.float64()))
    pq.write_table(pa.table({"s": structs, "m": maps}), runs.source)
    assert prompts("{m} {s}", defaults={"s": "-"}) == [
        '{"1": 0.5} {"when": "2024-02-29", "ids": [1, null], "tags": {"ä": false}}',
        '{} {"when": null, "ids": [], "tags": {}}',
        '{"2": null} -',
    ]


def test_nested_columns_of_pandas_polars_and_duckdb(prompts: Prompts, runs: Runs) -> None:
    columns = {"x": [{"a": [1, 2], "b": None}, {"a": None, "b": "q"}]}
    for write in (pd.DataFrame(columns).to_parquet, pl.DataFrame(columns).write_parquet):
        write(runs.source)
        assert prompts("{x}") == ['{"a": [1, 2], "b": null}', '{"a": null, "b": "q"}']
    record = "{'a': 1.25, 'm': map {'k': [timestamp '2024-01-01 10:00:00']}}"
    duckdb.sql(f"copy (select {record} as x) to '{runs.source}'")
    assert prompts("{x}") == ['{"a": 1.25, "m": {"k": ["2024-01-01T10:00:00"]}}']


def test_bytes_inside_of_a_column_are_refused_and_named(prompts: Prompts, runs: Runs) -> None:
    pq.write_table(pa.table({"s": [[{"raw": b"x"}]]}), runs.source)
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


def test_numbers_that_json_has_not_are_null_and_long_decimals_text() -> None:
    values = [math.nan, math.inf, 1e300, Decimal("1.10"), Decimal("0.1234567890123456789")]
    assert to_json(values) == '[null, null, 1e+300, 1.1, "0.1234567890123456789"]'
