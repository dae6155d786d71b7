"""Bad input fails with a named error that says what to do, and leaves everything else unharmed."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import errors
from jobs.context import JobContext
from jobs.parquet.files.storage import reading
from jobs.runs.plans import plan, spec
from jobs.runs.plans.names import PLAN
from tests.jobs.answering import MODEL, fails, queued_jobs, run_task, score_parquet, work_off
from tests.jobs.conftest import MakeContext


def test_a_lack_of_memory_is_not_taken_for_a_broken_file() -> None:
    with pytest.raises(MemoryError), reading("in.parquet"):
        raise pa.ArrowMemoryError("malloc of size 65536 failed")


def test_a_missing_column_names_those_found(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    error = fails(errors.MissingColumn, context, three_rows, tmp_path / "out", prompt_column="text")
    assert "'text'" in str(error)
    assert "'prompt', 'id'" in str(error)
    fails(errors.MissingColumn, context, three_rows, tmp_path / "out", template="{prompt} {nope}")
    fails(errors.MissingColumn, context, three_rows, tmp_path / "out", messages_column="nope")
    assert not (tmp_path / "out").exists()


def test_columns_that_cannot_be_prompts_are_refused(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    assert "int64" in str(
        fails(errors.WrongColumnType, context, three_rows, tmp_path / "out", prompt_column="id")
    )
    fails(errors.WrongColumnType, context, three_rows, tmp_path / "out", messages_column="id")
    pq.write_table(pa.table({"prompt": [[b"y"]], "raw": [b"x"]}), three_rows)
    fails(errors.WrongColumnType, context, three_rows, tmp_path / "out", template="{prompt}")
    fails(errors.WrongColumnType, context, three_rows, tmp_path / "out", template="{raw}")


def test_two_columns_of_one_name_are_refused(context: JobContext, tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "in.parquet")
    fails(errors.SchemaMismatch, context, tmp_path / "in.parquet", tmp_path / "out")


def test_files_with_other_columns_are_refused_by_name(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "id": ["text"]}), tmp_path / "other.parquet")
    error = fails(
        errors.SchemaMismatch,
        context,
        [str(three_rows), str(tmp_path / "other.parquet")],
        tmp_path / "out",
    )
    assert "other.parquet" in str(error)
    assert "id: string" in str(error)


@pytest.mark.parametrize("stride", [101, pytest.param(31, marks=pytest.mark.long)])
def test_every_truncation_and_every_broken_byte_fails_by_name_or_not_at_all(
    redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path, stride: int
) -> None:
    """Where it is planned, or where its shard is scored."""
    whole, context = three_rows.read_bytes(), make_context()
    others = (b"no Parquet", b"PAR1" + b"\xff" * 50 + b"PAR1")
    for content in (*others, *(whole[:length] for length in range(0, len(whole), 3 * stride))):
        three_rows.write_bytes(content)
        assert "in.parquet" in str(
            fails(errors.CorruptParquet, context, three_rows, tmp_path / "out")
        )
    for position in range(0, len(whole), stride):
        broken = bytearray(whole)
        broken[position] ^= 0xFF
        three_rows.write_bytes(broken)
        output = tmp_path / f"out{position}"
        with suppress(errors.InputError):
            planned = score_parquet(make_context(), str(three_rows), str(output))
            work_off(redis, make_context)
            assert pq.read_table(output).num_rows == planned["rows"]
        redis.flushall()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("us", "UTC"), 2**62), (pa.timestamp("ns"), -(2**62)), (pa.date32(), 2**31 - 1),
        (pa.time64("us"), 86_399_999_999), (pa.duration("s"), 2**62), (pa.string_view(), "x"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_pythons_types_cannot_hold_cost_their_row_at_most(
    redis: Redis, make_context: MakeContext, tmp_path: Path, kind: pa.DataType, value: Any
) -> None:
    storage = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    values = (
        pa.array([value], kind) if isinstance(value, str) else pa.array([value], storage).view(kind)
    )
    pq.write_table(pa.table({"v": values}), tmp_path / "in.parquet")
    score_parquet(
        make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), template="{v}"
    )
    work_off(redis, make_context)
    (row,) = pq.read_table(tmp_path / "out").select(["completion", "error"]).to_pylist()
    assert (row["completion"] is None) != (row["error"] is None)


@pytest.mark.parametrize("name", ["nothing.parquet", "*.nothing", "empty", "x" * 300, "x" * 5000])
def test_an_input_that_names_nothing_is_refused(
    context: JobContext, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert name in str(fails(errors.InputNotFound, context, tmp_path / name, tmp_path / "out"))


def test_a_fifo_is_no_input(context: JobContext, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.parquet")
    error = fails(errors.InputNotFound, context, tmp_path / "in.parquet", tmp_path / "out")
    assert "name a regular file" in str(error)


def test_a_file_named_twice_is_refused(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    fails(
        errors.InvalidJob, context, [str(three_rows), str(tmp_path / "*.parquet")], tmp_path / "out"
    )


def test_paths_outside_the_data_roots_are_refused(
    redis: Redis, three_rows: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    pq.write_table(pq.read_table(three_rows), outside / "in.parquet")
    (tmp_path / "link.parquet").symlink_to(outside / "in.parquet")
    (tmp_path / "linked").symlink_to(outside)
    context = JobContext(redis, "bulk", "j", "e", (str(tmp_path),), MODEL)
    inside = tmp_path / "out"
    for path in (
        outside / "in.parquet",
        f"{tmp_path}/../{outside.name}/in.parquet",
        tmp_path / "link.parquet",
        tmp_path,
        tmp_path / "linked",
        tmp_path / "linked" / "in.parquet",
        f"{tmp_path}/linked/*.parquet",
        f"{tmp_path}/*.parquet",
        f"{outside}/*.parquet",
        "/**/*.parquet",
        "/etc",
        "/",
        f"{tmp_path}-sibling/in.parquet",
    ):
        assert "TOKENMILL_DATA_ROOTS" in str(fails(errors.PathOutsideRoots, context, path, inside))
    for output in (outside / "out", tmp_path / "linked" / "out", f"{tmp_path}/../out"):
        fails(errors.PathOutsideRoots, context, three_rows, output)
    assert sorted(path.name for path in outside.iterdir()) == ["in.parquet"]


def test_a_shard_job_trusts_neither_its_arguments_nor_its_plan(
    redis: Redis,
    make_context: MakeContext,
    three_rows: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run = score_parquet(make_context(), str(three_rows), str(tmp_path / "out"))["run"]
    plan_path = tmp_path / "out" / PLAN
    outside = tmp_path_factory.mktemp("outside")
    (outside / PLAN).write_text(plan_path.read_text())
    (tmp_path / PLAN).write_text(plan_path.read_text())

    def refused(kind: type[errors.JobsError], *arguments: Any) -> None:
        with pytest.raises(kind):
            run_task(make_context(), "jobs.score_shard", *arguments)

    refused(errors.PathOutsideRoots, run, str(outside / PLAN), 0)
    refused(errors.PathOutsideRoots, run, "/etc/passwd", 0)
    refused(errors.PlanDamaged, run, str(tmp_path / PLAN), 0)
    refused(errors.PlanDamaged, run, str(tmp_path / "none"), 0)
    refused(errors.PlanDamaged, run, str(three_rows), 0)
    refused(errors.PlanDamaged, "0" * 16, str(plan_path), 0)
    refused(errors.PlanDamaged, run, str(plan_path), 1)
    edited = json.loads(plan_path.read_text())
    edited["files"][0]["path"] = "/etc/passwd"
    plan_path.write_text(json.dumps(edited))
    refused(errors.PathOutsideRoots, run, str(plan_path), 0)


def test_sampling_that_the_engine_refuses_fails_the_run_and_not_each_row(
    redis: Redis, three_rows: Path, tmp_path: Path
) -> None:
    def refuse_all(sampling: Any) -> None:
        raise ValueError(f"unknown {sorted(sampling)}")

    context = JobContext(redis, "bulk", "j", "e", (str(tmp_path),), MODEL, refuse_all)
    with pytest.raises(ValueError, match="temprature"):
        score_parquet(context, str(three_rows), str(tmp_path / "out"), sampling={"temprature": 1})
    assert queued_jobs(redis) == []


def test_unknown_arguments_fail_like_a_call(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    error = fails(errors.InvalidJob, context, three_rows, tmp_path / "out", colum="x")
    assert "'colum' is no argument of jobs.score_parquet" in str(error)
    fails(errors.InvalidJob, context, three_rows, tmp_path / "out", queue=3)
    for named in ({"input": None, "output": "/out"}, {"input": "/in.parquet", "output": None}):
        with pytest.raises(errors.InvalidJob, match="None is no path"):
            score_parquet(context, **named)


def test_sizes_beyond_their_bounds_are_refused_and_say_what_was_found(
    context: JobContext, three_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(text: str, *, input: Any = three_rows, **arguments: Any) -> None:
        assert text in str(fails(errors.InvalidJob, context, input, tmp_path / "out", **arguments))

    says("1000001, expected an integer from 1 to 1000000", rows_per_shard=1_000_001)
    says(
        "the template has 262145 characters, more than the limit of 262144", template="x" * 262_145
    )
    messages = [{"role": "user", "content": "x"}]
    says("the template has 101 messages, more than the limit of 100", template=messages * 101)
    long = [{"role": "user", "content": "x" * 262_141}]
    says("the template has 262145 characters, more than the limit of 262144", template=long)
    says("expected a text of 1 to 255 characters", prompt_column="x" * 256)
    says("at most 255 characters", queue="x" * 256)
    says("the input names 100001 files, more than the limit of 100000", input=["a"] * 100_001)
    monkeypatch.setattr(spec, "MAX_FILES", 1)
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "other.parquet")
    says("the input names 2 files, more than the limit of 1", input=f"{tmp_path}/*.parquet")
    monkeypatch.setattr(plan, "MAX_SHARDS", 2)
    says("3 rows in 1 files make more than 2 shards of at most 1 rows", rows_per_shard=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('the patient: {text} {"name": "Ann"}', "field 2 is no plain column name"),
        ("the patient {text.name}", "field 1 is no plain column name"),
        ("the patient {}", "field 1 is no plain column name"),
        ("the patient {" + "x" * 256 + "}", "field 1 is no plain column name"),
        ("the patient {% if text %}", "field 1 is no plain column name"),
        ("the patient {text", "expected '}' before end of string"),
        ("the patient }", "Single '}' encountered"),
    ],
)
def test_what_is_wrong_with_a_template_is_said_without_a_word_of_it(
    context: JobContext, three_rows: Path, tmp_path: Path, text: str, problem: str
) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    for template, where in ((text, "the template: "), (chat, "message 1 of the template: ")):
        error = fails(errors.InvalidJob, context, three_rows, tmp_path / "out", template=template)
        assert f"{where}{problem}" in str(error)
        assert "patient" not in str(error)
        assert 'name"' not in str(error)


def test_a_template_that_a_rows_values_blow_up_fails_that_row_before_it_is_built(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["a", "x" * 200_000]}), tmp_path / "in.parquet")
    template = "{text}" * 40_000  # eight gigabytes, if it were filled
    three_rows, output = tmp_path / "in.parquet", tmp_path / "out"
    score_parquet(
        make_context(), str(three_rows), str(output), template=template, rows_per_shard=100
    )
    work_off(redis, make_context)
    fine, refused = pq.read_table(output)["error"].to_pylist()
    assert fine is None
    assert (
        refused
        == "prompt has 8000000000 characters, more than the limit of 1048576 bytes: shorten it"
    )
