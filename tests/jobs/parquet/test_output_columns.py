"""What a run's output holds: kept columns, a prefix, a limit of rows, several completions of each."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest
from redis import Redis

from jobs.context.shared_files import ShardBytes
from jobs.errors import (
    ColumnConflict,
    InvalidJob,
    MissingColumn,
    OutputHoldsAnotherRun,
    ShardTooLarge,
)
from jobs.parquet.asks.ask import OUTPUT_FIELDS
from jobs.runs.plans.spec import RunSpec
from tests.jobs.answering import FakeCompletion, refuse, shout, work_off
from tests.jobs.local_runs import Runs

ANSWERS = [field.name for field in OUTPUT_FIELDS]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep": ["x", "extra"]}, ["extra", "x"]),
        ({"keep": []}, []),
        ({"keep": [], "filename_column": "file"}, ["file"]),
        ({"drop": ["prompt"]}, ["id", "extra", "x.y", "x"]),
    ],
)
def test_named_columns_are_kept_in_the_files_order_or_left_out(
    runs: Runs, options: dict[str, Any], left: list[str]
) -> None:
    runs.write(["a", "b"], extra=[{"z": 1}, None], **{"x.y": ["p", "q"]}, x=["r", "s"])
    table = runs.score(**options)
    assert table.column_names == [*left, *ANSWERS]
    assert table["completion"].to_pylist() == ["A", "B"]
    assert "x" not in left or table["x"].to_pylist() == ["r", "s"]


def test_dropped_columns_conflict_with_nothing_and_a_prefix_avoids_it(runs: Runs) -> None:
    runs.write(["a"], completion=["old"], error=["old"])
    with pytest.raises(ColumnConflict, match=r"'completion'.*drop.*output_prefix"):
        runs.plan()
    table = runs.score(output_prefix="llm_", drop=["error"])
    assert table.column_names == [
        "prompt",
        "id",
        "completion",
        *(f"llm_{name}" for name in ANSWERS),
    ]
    assert (table["completion"].to_pylist(), table["llm_completion"].to_pylist()) == (
        ["old"],
        ["A"],
    )


@pytest.mark.parametrize("options", [{"keep": ["id", "typo"]}, {"drop": ["typo"]}])
def test_columns_that_the_input_lacks_are_refused_by_name(
    runs: Runs, options: dict[str, Any]
) -> None:
    runs.write(["a"])
    with pytest.raises(MissingColumn, match="'typo'"):
        runs.plan(**options)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"keep": ["a"], "drop": ["b"]}, "keep and drop"),
        ({"output_prefix": "\ud800"}, "Unicode"),
        ({"limit": 0}, "limit is 0"),
        ({"single_file": "xml"}, "single_file is 'xml', expected true, false, or one of parquet"),
        ({"sampling": {"n": 128}, "rows_per_shard": 10_000}, "fewer rows_per_shard"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidJob, match=match):
        RunSpec.from_arguments("/in", "/out", **arguments)


def test_a_dropped_column_may_be_too_large_to_read(runs: Runs, redis: Redis) -> None:
    runs.write(["a", "b"], blob=[b"x" * 1_000_000] * 2, kept=[b"y" * 3] * 2)
    small = lambda: replace(runs.context(), shard_bytes=ShardBytes(100_000))  # noqa: E731
    runs.plan(drop=["blob"])
    work_off(redis, small)
    assert [row["kept"] for row in runs.rows()] == [b"yyy"] * 2
    runs.plan(output=runs.output.with_name("whole"))
    with pytest.raises(ShardTooLarge, match="'blob'"):
        work_off(redis, small)


@pytest.mark.parametrize("changed", [{"keep": ["id"]}, {"limit": 3}])
def test_another_option_is_another_run_and_is_named(runs: Runs, changed: dict[str, Any]) -> None:
    runs.write(["a", "b"])
    runs.plan()
    with pytest.raises(OutputHoldsAnotherRun, match=next(iter(changed))):
        runs.plan(**changed)
    runs.plan(keep=None, drop=None, output_prefix="", limit=None)


def test_options_that_were_not_given_are_not_in_a_plan_and_those_of_a_later_version_are_refused() -> (
    None
):
    spec = RunSpec.from_arguments("/in", "/out")
    assert not {"keep", "drop", "output_prefix", "limit"} & spec.to_json().keys()
    full = RunSpec.from_arguments("/in", "/out", drop=["b", "a", "b"], output_prefix="p", limit=2)
    assert full.drop == ["a", "b"]
    assert RunSpec(**json.loads(json.dumps(full.to_json()))) == full
    with pytest.raises(TypeError, match="'later'"):
        RunSpec(**{**spec.to_json(), "later": 1})


def test_a_limited_run_reads_no_file_behind_its_last_row(runs: Runs, tmp_path: Path) -> None:
    for name, prompts in (("1", "abcd"), ("2", "ef")):
        runs.write([*prompts]).rename(tmp_path / f"{name}.parquet")
    (tmp_path / "3.parquet").write_bytes(b"no Parquet")
    options = {"source": tmp_path / "*.parquet", "rows_per_shard": 3, "limit": 5}
    assert runs.score(**options)["completion"].to_pylist() == list("ABCDE")
    (tmp_path / "3.parquet").unlink()
    assert runs.plan(**options)["already_finished"]
    assert runs.manifest["rows"] == 5


def test_several_completions_of_a_row_are_lists_of_n(runs: Runs) -> None:
    def answer(request: Any) -> FakeCompletion:
        return refuse("too bad") if request.prompt == "bad" else shout(request)

    runs.write(["ab", None, "bad", "ab"])
    rows = runs.score(answer=answer, sampling={"n": 3, "temperature": 0}).to_pylist()
    assert rows[0]["completion"] == ["AB", "AB!", "AB!!"]
    assert rows[0]["finish_reason"] == ["stop"] * 3
    assert rows[0]["completion_tokens"] == [2, 2, 2]
    assert (rows[0]["prompt_tokens"], rows[0]["cached_tokens"], rows[0]["error"]) == (2, 1, None)
    for row, error in ((rows[1], "prompt is null"), (rows[2], "too bad")):
        assert (row["error"], row["completion_tokens"]) == (error, [0] * 3)
        assert (row["completion"], row["finish_reason"]) == ([None] * 3, ["error"] * 3)
    assert rows[3] == {**rows[0], "id": 3}
    manifest = runs.manifest
    assert (manifest["completion_tokens"], manifest["generated_tokens"], manifest["errors"]) == (
        12,
        6,
        2,
    )


def test_lists_of_completions_explode_in_pandas_polars_and_duckdb(runs: Runs) -> None:
    runs.write(["ab", None])
    runs.score(sampling={"n": 2}, keep=["id"])
    expected = [(0, "AB"), (0, "AB!"), (1, None), (1, None)]
    lists = ["completion", "finish_reason", "completion_tokens"]
    frame = pd.read_parquet(runs.output).explode(lists).astype({"completion": object})
    found = frame["completion"].where(frame["completion"].notna(), None)
    assert list(zip(frame["id"], found, strict=True)) == expected
    parts = str(runs.output / "*.parquet")
    exploded = pl.read_parquet(parts).explode(*lists)
    assert list(zip(exploded["id"], exploded["completion"], strict=True)) == expected
    assert duckdb.sql(f"select id, unnest(completion) from '{parts}'").fetchall() == expected
