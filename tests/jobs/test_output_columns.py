"""What a run's output holds: kept columns, a prefix, a limit of rows, several completions of each."""

from __future__ import annotations

import json
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from jobs.context import JobContext
from jobs.context.shard_bytes import ShardBytes
from jobs.errors import ColumnConflict, InvalidJob, MissingColumn, OutputHoldsAnotherRun, ShardTooLarge
from jobs.parquet.part import OUTPUT_FIELDS
from jobs.runs.plans.plan import cut_shards
from jobs.runs.plans.spec import RunSpec
from tests.jobs.answering import FakeCompletion, queued_jobs, refuse, run_task, score_parquet, shout, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]
Score = Callable[..., pa.Table]
ANSWERS = [field.name for field in OUTPUT_FIELDS]
GREEDY = {"temperature": 0}


@pytest.fixture
def score(redis: Redis, make_context: MakeContext, tmp_path: Path) -> Score:
    """Runs a file, or whatever `input` names, to its end and returns the output."""

    def run(input: object = None, *, answer: Any = shout, **arguments: Any) -> pa.Table:
        out = tmp_path / "out"
        score_parquet(make_context(), str(input or tmp_path / "in.parquet"), str(out), **arguments)
        work_off(redis, make_context, answer=answer)
        assert (out / "_SUCCESS").exists()
        return pq.read_table(out)

    return run


def write(path: Path, prompts: list[str | None], **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"id": range(len(prompts)), "prompt": prompts, **columns}), path, row_group_size=3
    )


def test_keep_leaves_only_the_named_columns_in_the_files_order(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["a", "b"], extra=[1.5, None], **{"x.y": ["p", "q"]}, x=["r", "s"])
    table = score(keep=["x", "extra"])
    assert table.column_names == ["extra", "x", *ANSWERS]
    assert table["x"].to_pylist() == ["r", "s"]
    assert table["completion"].to_pylist() == ["A", "B"]


def test_keep_of_nothing_leaves_the_answers(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["a", "b", "c", "d"])
    table = score(keep=[])
    assert table.column_names == ANSWERS
    assert table["completion"].to_pylist() == ["A", "B", "C", "D"]


def test_drop_leaves_the_other_columns_and_the_prompt_may_be_dropped(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["a", "b"], extra=[{"z": 1}, None])
    table = score(drop=["prompt"])
    assert table.column_names == ["id", "extra", *ANSWERS]
    assert table["completion"].to_pylist() == ["A", "B"]


def test_columns_of_folders_and_of_the_files_name_are_kept_and_dropped_too(
    score: Score, tmp_path: Path
) -> None:
    write(tmp_path / "in" / "lang=de" / "day=1" / "a.parquet", ["a"])
    table = score(tmp_path / "in", filename_column="file", keep=["lang"])
    assert table.column_names == ["lang", "file", *ANSWERS], "the files' names were asked for by name"
    assert table["file"].to_pylist() == [str(tmp_path / "in" / "lang=de" / "day=1" / "a.parquet")]


def test_a_dropped_folder_column_may_stand_in_the_template(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in" / "lang=de" / "a.parquet", ["a"])
    table = score(tmp_path / "in", template="{lang} {prompt}", drop=["lang", "prompt"])
    assert table.column_names == ["id", *ANSWERS]
    assert table["completion"].to_pylist() == ["DE A"]


def test_dropped_columns_conflict_with_nothing_and_a_prefix_avoids_it(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["a"], completion=["old"], error=["old"])
    with pytest.raises(ColumnConflict, match=r"'completion'.*drop.*output_prefix"):
        score()
    table = score(output_prefix="llm_", drop=["error"])
    assert table.column_names == ["id", "prompt", "completion", *(f"llm_{name}" for name in ANSWERS)]
    assert (table["completion"].to_pylist(), table["llm_completion"].to_pylist()) == (["old"], ["A"])


def test_a_prefixed_name_that_is_there_already_conflicts(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["a"], ä_error=[1])
    with pytest.raises(ColumnConflict, match="'ä_error'"):
        score(output_prefix="ä_")


def test_columns_that_the_input_lacks_are_refused_by_name(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["a"])
    with pytest.raises(MissingColumn, match="'typo'"):
        score(keep=["id", "typo"])
    with pytest.raises(MissingColumn, match="'typo'"):
        score(drop=["typo"])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"keep": ["a"], "drop": ["b"]}, "keep and drop"),
        ({"keep": "id"}, "expected a list"),
        ({"drop": [1]}, "name of a column"),
        ({"keep": [""]}, "name of a column"),
        ({"output_prefix": 3}, "output_prefix is 3"),
        ({"output_prefix": "\ud800"}, "Unicode"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": True}, "limit is True"),
        ({"limit": "5"}, "limit:="),
        ({"limit": 2.0}, "limit is 2.0"),
        ({"sampling": {"n": 128}, "rows_per_shard": 10_000}, "fewer rows_per_shard"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidJob, match=match):
        RunSpec.from_arguments("/in", "/out", **arguments)


def test_an_option_that_is_none_is_refused_by_name(make_context: MakeContext, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["a"])
    with pytest.raises(InvalidJob, match=r"'kep' is no argument.*keep, drop, output_prefix, limit"):
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), kep=["id"])


def test_a_dropped_column_may_be_too_large_to_read(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    write(tmp_path / "in.parquet", ["a", "b"], blob=[b"x" * 200_000] * 2, kept=[b"y" * 3] * 2)
    small = lambda: replace(make_context(), shard_bytes=ShardBytes(100_000))  # noqa: E731
    for number, options in enumerate([{"drop": ["blob"]}, {"keep": ["kept"]}, {"drop": ["kept"]}]):
        out = tmp_path / f"out{number}"
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(out), **options)
        if options == {"drop": ["kept"]}:
            with pytest.raises(ShardTooLarge, match="'blob'"):
                work_off(redis, small)
        else:
            work_off(redis, small)
            assert pq.read_table(out)["kept"].to_pylist() == [b"yyy"] * 2


@pytest.mark.parametrize(
    "changed",
    [{"keep": ["id"]}, {"drop": ["id"]}, {"output_prefix": "x"}, {"limit": 3}, {"sampling": {"n": 2}}],
)
def test_another_option_is_another_run_and_is_named(
    make_context: MakeContext, tmp_path: Path, changed: dict[str, Any]
) -> None:
    write(tmp_path / "in.parquet", ["a", "b"])
    source, out = str(tmp_path / "in.parquet"), str(tmp_path / "out")
    score_parquet(make_context(), source, out)
    with pytest.raises(OutputHoldsAnotherRun, match=next(iter(changed))):
        score_parquet(make_context(), source, out, **changed)
    score_parquet(make_context(), source, out, keep=None, drop=None, output_prefix="", limit=None)


def test_a_plan_from_before_the_options_is_the_same_run_and_one_of_a_later_version_is_refused() -> None:
    spec = RunSpec.from_arguments("/in", "/out")
    assert not {"keep", "drop", "output_prefix", "limit"} & spec.to_json().keys()
    assert RunSpec.from_json(spec.to_json()) == spec
    full = RunSpec.from_arguments("/in", "/out", drop=["b", "a", "b"], output_prefix="p", limit=2)
    assert full.drop == ["a", "b"]
    assert RunSpec.from_json(json.loads(json.dumps(full.to_json()))) == full
    with pytest.raises(ValueError, match="'later', of another version"):
        RunSpec.from_json({**spec.to_json(), "later": 1})


layouts = st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=4)


@given(layouts, st.integers(1, 20), st.integers(1, 200))
def test_a_limit_takes_the_first_rows_and_no_more(layout: list[list[int]], size: int, limit: int) -> None:
    rows = [
        (shard.file, row)
        for shard in cut_shards(layout, size, limit)
        for row in range(shard.start, shard.start + shard.rows)
    ]
    assert rows == [(file, row) for file, groups in enumerate(layout) for row in range(sum(groups))][:limit]
    for shard in cut_shards(layout, size, limit):
        groups = layout[shard.file]
        assert sum(groups[: shard.first_group]) + shard.skip == shard.start


def test_a_limited_run_reads_no_file_behind_its_last_row(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    write(tmp_path / "1.parquet", ["a", "b", "c", "d"])
    write(tmp_path / "2.parquet", ["e", "f"])
    (tmp_path / "3.parquet").write_bytes(b"no Parquet")
    source, out = str(tmp_path / "*.parquet"), str(tmp_path / "out")
    plan = score_parquet(make_context(), source, out, rows_per_shard=3, limit=5)
    assert (plan["rows"], plan["shards"]) == (5, 3)
    work_off(redis, make_context)
    (tmp_path / "3.parquet").unlink()
    again = score_parquet(make_context(), source, out, rows_per_shard=3, limit=5)
    assert again["already_finished"]
    assert pq.read_table(out)["completion"].to_pylist() == list("ABCDE")
    assert json.loads((Path(out) / "_manifest.json").read_text())["rows"] == 5


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=st.integers(1, 12), rows=st.integers(0, 10))
def test_a_limit_beyond_the_end_is_all_rows(
    redis: Redis, make_context: MakeContext, tmp_path: Path, limit: int, rows: int
) -> None:
    redis.flushall()
    folder = tmp_path / f"{limit}-{rows}"
    write(folder / "in.parquet", [f"row {number}" for number in range(rows)])
    plan = score_parquet(make_context(), str(folder / "in.parquet"), str(folder / "out"), limit=limit)
    work_off(redis, make_context)
    assert plan["rows"] == min(limit, rows)
    assert pq.read_table(folder / "out")["id"].to_pylist() == list(range(min(limit, rows)))


def test_several_completions_of_a_row_are_lists_of_n(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["ab", None, "bad", "ab"])

    def answer(request: Any) -> FakeCompletion:
        return refuse("too bad") if request.prompt == "bad" else shout(request)

    table = score(answer=answer, sampling={"n": 3, "temperature": 0})
    rows = table.to_pylist()
    assert rows[0]["completion"] == ["AB", "AB!", "AB!!"]
    assert rows[0]["finish_reason"] == ["stop"] * 3
    assert rows[0]["completion_tokens"] == [2, 2, 2]
    assert (rows[0]["prompt_tokens"], rows[0]["cached_tokens"], rows[0]["error"]) == (2, 1, None)
    for row, error in ((rows[1], "prompt is null"), (rows[2], "too bad")):
        assert row["error"] == error
        assert (row["completion"], row["finish_reason"]) == ([None] * 3, ["error"] * 3)
        assert row["completion_tokens"] == [0] * 3
    assert rows[3] == {**rows[0], "id": 3}
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert (manifest["completion_tokens"], manifest["generated_tokens"], manifest["errors"]) == (12, 6, 2)


def test_lists_of_completions_explode_in_pandas_polars_and_duckdb(score: Score, tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ["ab", None])
    score(sampling={"n": 2}, keep=["id"])
    expected = [(0, "AB"), (0, "AB!"), (1, None), (1, None)]
    lists = ["completion", "finish_reason", "completion_tokens"]
    frame = pd.read_parquet(tmp_path / "out").explode(lists).astype({"completion": object})
    found = frame["completion"].where(frame["completion"].notna(), None)
    assert list(zip(frame["id"], found, strict=True)) == expected
    parts = str(tmp_path / "out" / "*.parquet")
    exploded = pl.read_parquet(parts).explode(*lists)
    assert list(zip(exploded["id"], exploded["completion"], strict=True)) == expected
    assert duckdb.sql(f"select id, unnest(completion) from '{parts}'").fetchall() == expected


def test_a_greedy_prompt_of_another_shard_is_not_computed_again_for_its_list(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    write(tmp_path / "in.parquet", ["a", "a"])
    context = make_context()
    sampling = {"n": 2, "temperature": 0}
    source, out = str(tmp_path / "in.parquet"), str(tmp_path / "out")
    score_parquet(context, source, out, sampling=sampling, rows_per_shard=1)
    asked: list[Any] = []
    for job in queued_jobs(redis):
        run_task(
            replace(make_context(), answers=context.answers),
            job.func_name,
            *job.args,
            answer=lambda request: asked.append(request) or shout(request),
        )
    assert len(asked) == 1
    assert pq.read_table(out)["completion"].to_pylist() == [["A", "A!"]] * 2


def test_the_options_reach_a_run_from_the_command_line(
    invoke: Invoke, redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    write(tmp_path / "in.parquet", ["a", "b", "c"], **{"x,y": [1, 2, 3]})
    options = ["--keep", '"x,y",id', "--keep", "prompt", "--output-prefix", "o_", "--limit", 2, "--n", 2]
    result = invoke("submit", tmp_path / "in.parquet", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    work_off(redis, make_context)  # the planning
    work_off(redis, make_context)
    table = pq.read_table(tmp_path / "out")
    assert table.column_names == ["id", "prompt", "x,y", *(f"o_{name}" for name in ANSWERS)]
    assert table["o_completion"].to_pylist() == [["A", "A!"], ["B", "B!"]]


def test_the_command_line_refuses_a_column_to_keep_that_the_file_lacks(
    invoke: Invoke, tmp_path: Path
) -> None:
    write(tmp_path / "in.parquet", ["a"])
    result = invoke("submit", tmp_path / "in.parquet", tmp_path / "out", "--drop", "typo")
    assert (result.exit_code, "MissingColumn" in result.output, "'typo'" in result.output) == (1, True, True)
    both = invoke("submit", tmp_path / "in.parquet", tmp_path / "out", "--drop", "id", "--keep", "id")
    assert "keep and drop" in both.output
