"""Sampling values from columns: each row its own, null leaves the run's, a wrong one fails its row alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import InvalidJob, MissingColumn, WrongColumnType
from jobs.installed import check_sampling
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, shout
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs

Run = Callable[..., tuple[list[Request], list[dict[str, Any]]]]


@pytest.fixture
def make_context(make_context: MakeContext) -> MakeContext:
    return lambda: replace(make_context(), check_sampling=check_sampling)


@pytest.fixture
def run(runs: Runs) -> Run:
    """Scores in.parquet; returns the requests and the rows."""

    def score(
        columns: dict[str, str], **arguments: Any
    ) -> tuple[list[Request], list[dict[str, Any]]]:
        asked: list[Request] = []

        def answer(request: Request) -> FakeCompletion:
            asked.append(request)
            return shout(request)

        rows = runs.score(answer=answer, sampling_columns=columns, **arguments).to_pylist()
        return sorted(asked, key=lambda request: str(request.prompt)), rows

    return score


def write(path: Path, **columns: Any) -> None:
    size = len(next(iter(columns.values())))
    pq.write_table(pa.table({"prompt": [f"p{number}" for number in range(size)], **columns}), path)


def test_each_row_has_its_own_values_and_null_the_runs(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", limit=[3, None, 5], t=[0.0, 0.5, None], ends=[["a"], None, []])
    columns = {"max_tokens": "limit", "temperature": "t", "stop": "ends"}
    asked, rows = run(columns, sampling={"max_tokens": 9, "seed": 1})
    assert [row["completion"] for row in rows] == ["P0", "P1", "P2"]
    first, second, third = (dict(request.sampling) for request in asked)
    assert first == {"max_tokens": 3, "temperature": 0, "stop": ["a"]}
    assert isinstance(second.pop("seed"), int)
    assert second == {"max_tokens": 9, "temperature": 0.5}
    assert third.pop("seed") != 1
    assert third == {"max_tokens": 5, "stop": []}


def test_numbers_with_a_decimal_comma_are_read_where_the_run_says_so(
    run: Run, tmp_path: Path
) -> None:
    source = tmp_path / "in.csv"
    source.write_text("prompt;limit;t\np0;5;0,7\np1;;\np2;1;1,50\n")
    columns = {"max_tokens": "limit", "temperature": "t"}
    asked, _ = run(columns, source=source, delimiter=";", decimal=",", sampling={"temperature": 0})
    values = [(each.sampling.get("max_tokens"), each.sampling["temperature"]) for each in asked]
    assert values == [(5, 0.7), (None, 0), (1, 1.5)]
    with pytest.raises(WrongColumnType, match="submit with decimal=',' or --decimal ,"):
        run(columns, source=source, output=tmp_path / "other", delimiter=";")


def test_a_wrong_value_fails_its_row_by_name_and_no_other(run: Run, tmp_path: Path) -> None:
    write(
        tmp_path / "in.parquet", limit=[3.0, -1.0, 2.5, float("nan"), None], least=[9, 0, 0, 0, 0]
    )
    asked, rows = run({"max_tokens": "limit", "min_tokens": "least"})
    assert [row["error"] is None for row in rows] == [False, False, False, False, True]
    assert [request.prompt for request in asked] == ["p4"]
    assert rows[0]["error"] == "min_tokens=9 is above max_tokens=3"
    assert rows[1]["error"].startswith("column 'limit': max_tokens must be between 1")
    assert "column 'limit': max_tokens must be an integer" in rows[2]["error"]
    assert "column 'limit': max_tokens must be" in rows[3]["error"]


def test_equal_greedy_prompts_with_equal_values_are_one_request(run: Run, tmp_path: Path) -> None:
    columns = {"prompt": ["a\n{}"] * 6, "t": [0, 0, 0, 1, 1, None], "limit": [1, 1, 2, 1, 1, 1]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    names = {"temperature": "t", "max_tokens": "limit"}
    asked, rows = run(names, sampling={"temperature": 0})
    found = sorted(
        (request.sampling["temperature"], request.sampling["max_tokens"]) for request in asked
    )
    assert found == [(0, 1), (0, 2), (1, 1), (1, 1)], (
        "null is the run's greedy 0: one with the first two"
    )
    assert {request.prompt for request in asked} == {"a\n{}"}
    assert [row["completion"] for row in rows] == ["A\n{}"] * 6
    assert (
        len({request.sampling["seed"] for request in asked if request.sampling["temperature"]}) == 2
    )


def test_numbers_as_pandas_polars_and_duckdb_write_them(run: Run, tmp_path: Path) -> None:
    """pandas makes floats of integers with a null among them, DuckDB decimals of what has a point."""
    path, prompts, reals = tmp_path / "in.parquet", ["a", "b", "c"], [1.0, 0.5, 0.25]
    pandas = pd.DataFrame({"prompt": prompts, "limit": [4, None, 6], "t": reals})
    limits = pl.Series([4, None, 6], dtype=pl.UInt8)
    polars = pl.DataFrame({"prompt": prompts, "limit": limits, "t": reals})
    rows = "('a', 4::hugeint, 1.00), ('b', null, 0.50), ('c', 6, 0.25)"
    for writer, write_file in {
        "pandas": lambda: pandas.to_parquet(path),
        "polars": lambda: polars.write_parquet(path),
        "duckdb": lambda: duckdb.sql(
            f"""copy (from (values {rows}) as v(prompt, "limit", t)) to '{path}'"""
        ),
    }.items():
        write_file()
        asked, _ = run({"max_tokens": "limit", "temperature": "t"}, sampling={"max_tokens": 9})
        values = [
            (request.sampling["max_tokens"], request.sampling["temperature"]) for request in asked
        ]
        assert values == [(4, 1), (9, 0.5), (6, 0.25)], writer
        (tmp_path / "out").rename(tmp_path / f"out of {writer}")


@pytest.mark.parametrize(
    ("column", "kind", "name"),
    [(["3"], pa.string(), "max_tokens"), ([1], pa.timestamp("s"), "seed")],
)
def test_a_column_of_a_type_that_cannot_be_the_value_is_refused_when_planned(
    run: Run, tmp_path: Path, column: list[Any], kind: pa.DataType, name: str
) -> None:
    write(tmp_path / "in.parquet", v=pa.array(column, kind))
    with pytest.raises(WrongColumnType, match=f"'v'.*{name}"):
        run({name: "v"})


def test_missing_columns_and_unknown_names_are_refused_when_planned(
    run: Run, tmp_path: Path
) -> None:
    write(tmp_path / "in.parquet", v=[1])
    with pytest.raises(MissingColumn, match="'w'"):
        run({"max_tokens": "w"})
    with pytest.raises(InvalidJob, match="did you mean max_tokens"):
        run({"max_tokns": "v"})
    with pytest.raises(InvalidJob, match="n cannot"):
        run({"n": "v"})
