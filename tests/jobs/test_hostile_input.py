"""Bad input fails with a named error that says what to do, and leaves everything else unharmed."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import errors
from jobs.context import JobContext
from jobs.context.shared_files import SharedFiles
from jobs.parquet.part import part_stats, write_part
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.run_folder import RunFolder
from jobs.parquet.shard_work import ShardWork, trusted_plan
from jobs.parquet.storage import Storage, reading
from jobs.runs import plan, spec
from jobs.runs.names import PLAN, part_name
from jobs.runs.spec import RunSpec
from jobs.runs.state import RunState
from tests.jobs.answering import (
    MODEL,
    feed,
    opened_task,
    queued_jobs,
    run_task,
    score_parquet,
    shout,
    work_off,
)

MakeContext = Callable[[], JobContext]


def test_a_lack_of_memory_is_not_taken_for_a_broken_file_nor_a_broken_size_for_a_lack() -> None:
    with pytest.raises(MemoryError), reading("in.parquet"):
        raise pa.ArrowMemoryError("malloc of size 65536 failed")
    with pytest.raises(errors.CorruptParquet, match=r"in\.parquet"), reading("in.parquet"):
        pa.allocate_buffer(1 << 60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "id": [1, 2, 3]}), path, row_group_size=1)
    return path


def fails(
    kind: type[errors.JobsError], context: JobContext, source: Any, output: Any, **arguments: Any
) -> errors.JobsError:
    """Check that planning fails with `kind` and enqueued nothing; return the error."""
    with pytest.raises(kind) as caught:
        score_parquet(context, source if isinstance(source, list) else str(source), str(output), **arguments)
    assert type(caught.value) is kind or kind is errors.InvalidJob  # which InvalidValue is too
    assert queued_jobs(context.connection) == []
    return caught.value


def test_a_missing_column_names_those_found(context: JobContext, source: Path, tmp_path: Path) -> None:
    error = fails(errors.MissingColumn, context, source, tmp_path / "out", prompt_column="text")
    assert "'text'" in str(error)
    assert "'prompt', 'id'" in str(error)
    fails(errors.MissingColumn, context, source, tmp_path / "out", template="{prompt} {nope}")
    fails(errors.MissingColumn, context, source, tmp_path / "out", messages_column="nope")
    assert not (tmp_path / "out").exists()


def test_columns_that_cannot_be_prompts_are_refused(
    context: JobContext, source: Path, tmp_path: Path
) -> None:
    assert "int64" in str(
        fails(errors.WrongColumnType, context, source, tmp_path / "out", prompt_column="id")
    )
    fails(errors.WrongColumnType, context, source, tmp_path / "out", messages_column="id")
    pq.write_table(pa.table({"prompt": [[b"y"]], "raw": [b"x"]}), source)
    fails(errors.WrongColumnType, context, source, tmp_path / "out", template="{prompt}")
    fails(errors.WrongColumnType, context, source, tmp_path / "out", template="{raw}")


@pytest.mark.parametrize("name", ["completion", "error", "cached_tokens"])
def test_an_input_column_named_like_an_output_column_is_refused(
    context: JobContext, tmp_path: Path, name: str
) -> None:
    pq.write_table(pa.table({"prompt": ["a"], name: ["x"]}), tmp_path / "in.parquet")
    assert name in str(fails(errors.ColumnConflict, context, tmp_path / "in.parquet", tmp_path / "out"))


def test_two_columns_of_one_name_are_refused(context: JobContext, tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "in.parquet")
    fails(errors.SchemaMismatch, context, tmp_path / "in.parquet", tmp_path / "out")


def test_files_with_other_columns_are_refused_by_name(
    context: JobContext, source: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "id": ["text"]}), tmp_path / "other.parquet")
    error = fails(
        errors.SchemaMismatch, context, [str(source), str(tmp_path / "other.parquet")], tmp_path / "out"
    )
    assert "other.parquet" in str(error)
    assert "id: string" in str(error)


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"hello world, no parquet at all", b"PAR1" + b"\xff" * 50 + b"PAR1"]
)
def test_what_is_no_parquet_is_named(context: JobContext, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.parquet").write_bytes(content)
    error = fails(errors.CorruptParquet, context, tmp_path / "in.parquet", tmp_path / "out")
    assert "in.parquet" in str(error)


def test_every_truncation_and_every_broken_byte_fails_by_name_or_not_at_all(
    context: JobContext, source: Path, tmp_path: Path
) -> None:
    whole = source.read_bytes()
    for length in range(0, len(whole), 97):
        source.write_bytes(whole[:length])
        fails(errors.CorruptParquet, context, source, tmp_path / "out")
    for position in range(0, len(whole), 31):
        broken = bytearray(whole)
        broken[position] ^= 0xFF
        source.write_bytes(broken)
        try:
            score_parquet(context, str(source), str(tmp_path / f"out{position}"))
        except errors.InputError:
            continue


def test_a_page_that_turns_out_broken_fails_its_shard_by_name(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"prompt {n}" for n in range(100)]}), path, compression="none")
    broken = bytearray(path.read_bytes())
    broken[4:200] = b"\xff" * 196
    path.write_bytes(broken)
    score_parquet(make_context(), str(path), str(tmp_path / "out"))
    (job,) = queued_jobs(redis)
    with pytest.raises(errors.CorruptParquet, match=r"in\.parquet"):
        run_task(make_context(), job.func_name, *job.args)


@pytest.mark.parametrize("name", ["nothing.parquet", "*.nothing", "empty", "x" * 300, "x" * 5000])
def test_an_input_that_names_nothing_is_refused(context: JobContext, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert name in str(fails(errors.InputNotFound, context, tmp_path / name, tmp_path / "out"))


def test_a_fifo_is_no_input(context: JobContext, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.parquet")
    error = fails(errors.InputNotFound, context, tmp_path / "in.parquet", tmp_path / "out")
    assert "name a regular file" in str(error)


def test_a_file_named_twice_is_refused(context: JobContext, source: Path, tmp_path: Path) -> None:
    fails(errors.InvalidJob, context, [str(source), str(tmp_path / "*.parquet")], tmp_path / "out")


def test_paths_outside_the_data_roots_are_refused(
    redis: Redis, source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    pq.write_table(pq.read_table(source), outside / "in.parquet")
    (tmp_path / "link.parquet").symlink_to(outside / "in.parquet")
    (tmp_path / "linked").symlink_to(outside)
    context = JobContext(redis, "bulk", "j", "e", (str(tmp_path),), MODEL)
    inside = tmp_path / "out"
    for path in (
        outside / "in.parquet",
        f"{tmp_path}/../{outside.name}/in.parquet",
        tmp_path / "link.parquet",
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
        fails(errors.PathOutsideRoots, context, source, output)
    assert sorted(path.name for path in outside.iterdir()) == ["in.parquet"]


def test_a_folder_with_a_link_that_leads_out_is_refused(
    redis: Redis, source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "x.parquet"
    outside.write_bytes(source.read_bytes())
    (tmp_path / "z.parquet").symlink_to(outside)
    context = JobContext(redis, "bulk", "j", "e", (str(tmp_path),), MODEL)
    fails(errors.PathOutsideRoots, context, tmp_path, tmp_path / "out")


def test_a_shard_job_trusts_neither_its_arguments_nor_its_plan(
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
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
    refused(errors.PlanDamaged, run, str(source), 0)
    refused(errors.PlanDamaged, "0" * 16, str(plan_path), 0)
    refused(errors.PlanDamaged, run, str(plan_path), 1)
    edited = json.loads(plan_path.read_text())
    edited["files"][0]["path"] = "/etc/passwd"
    plan_path.write_text(json.dumps(edited))
    refused(errors.PathOutsideRoots, run, str(plan_path), 0)


def test_another_runs_folder_is_refused_and_says_what_differs(
    make_context: MakeContext, redis: Redis, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    work_off(redis, make_context)
    error = fails(
        errors.OutputHoldsAnotherRun, make_context(), source, tmp_path / "out", sampling={"max_tokens": 3}
    )
    assert "sampling" in str(error)
    assert (tmp_path / "out" / part_name(0)).exists()


def test_a_folder_with_other_files_is_refused(context: JobContext, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    assert "thesis.txt" in str(fails(errors.OutputHoldsForeignFiles, context, source, tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_damaged_plan_is_named(make_context: MakeContext, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PLAN).write_text("{")
    assert PLAN in str(fails(errors.PlanDamaged, make_context(), source, tmp_path / "out"))


def change_content(source: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b", "d"], "id": [1, 2, 3]}), source)


def change_rows(source: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "id": [1]}), source)


def remove(source: Path) -> None:
    source.rename(source.with_name("elsewhere"))


@pytest.mark.parametrize("change", [change_content, change_rows])
def test_a_changed_input_stops_resume_and_shards_and_keeps_finished_parts(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)
    first, second, _ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    change(source)
    with pytest.raises(errors.InputChanged, match=r"in\.parquet"):
        run_task(make_context(), second.func_name, *second.args)
    redis.flushall()
    fails(errors.InputChanged, make_context(), source, tmp_path / "out", rows_per_shard=1)
    assert (tmp_path / "out" / part_name(0)).exists()
    assert not list((tmp_path / "out").glob("_tmp.*"))


def test_an_input_that_changes_while_its_shard_runs_is_noticed(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    (job,) = queued_jobs(redis)
    for change in (change_content, remove):
        if change is remove:
            redis.flushall()
            (tmp_path / "out" / PLAN).unlink()
            score_parquet(make_context(), str(source), str(tmp_path / "out"))
        task = opened_task(make_context(), job.func_name, job.args)
        feed(task)
        change(source)
        with pytest.raises(errors.InputChanged):
            task.result()
        task.close()


@pytest.mark.parametrize("row_group_size", [1, 3])  # like the planned file's, so that reading works, or not
def test_an_input_that_is_replaced_while_its_part_is_written_is_not_published(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path, row_group_size: int
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    (job,) = queued_jobs(redis)

    class ReplacedMeanwhile(Storage):
        def open_output(self, path: str) -> Any:
            table = pa.table({"prompt": ["a", "b", "d"], "id": [1, 2, 3]})
            pq.write_table(table, source, row_group_size=row_group_size)
            return super().open_output(path)

    storage = ReplacedMeanwhile((str(tmp_path),))
    plan = trusted_plan(storage, job.args[1], job.args[0], SharedFiles())
    work = ShardWork(make_context(), RunFolder(storage, plan, RunState(redis, plan.run), "e"), 0)
    for index, request in enumerate(work.requests()):
        work.deliver(index, [shout(request)])
    with pytest.raises(errors.InputChanged):
        work.result()
    work.close()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [PLAN]


def test_a_file_added_to_the_folder_is_a_changed_input(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), f"{tmp_path}/*.parquet", str(tmp_path / "out"))
    redis.flushall()
    (tmp_path / "new.parquet").write_bytes(source.read_bytes())
    error = fails(errors.InputChanged, make_context(), f"{tmp_path}/*.parquet", tmp_path / "out")
    assert "new.parquet" in str(error)


def test_a_folder_that_cannot_be_written_is_named(context: JobContext, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(errors.OutputNotWritable, context, source, tmp_path / "file" / "out")
    fails(errors.OutputNotWritable, context, source, tmp_path / "file")
    fails(errors.OutputNotWritable, context, source, tmp_path / ("x" * 300))


class FailingStorage(Storage):
    """Every write fails with one error, as on a full or read-only disk."""

    def __init__(self, roots: tuple[str, ...], number: int) -> None:
        super().__init__(roots)
        self._number = number

    def open_output(self, path: str) -> Any:
        super().open_output(path).close()  # the file is there, its contents are not
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, errors.DiskFull),
        (errno.EDQUOT, errors.DiskFull),
        (errno.EROFS, errors.OutputNotWritable),
        (errno.EACCES, errors.OutputNotWritable),
    ],
)
def test_a_disk_that_refuses_fails_by_name_keeps_parts_and_leaves_no_leftovers(
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    number: int,
    kind: type[errors.JobsError],
) -> None:
    context = make_context()
    failing = FailingStorage(context.data_roots, number)
    spec = RunSpec.from_arguments(str(source), str(tmp_path / "out"), rows_per_shard=2)
    with pytest.raises(kind):
        plan_run(context, failing, spec, Submission("bulk"))
    plan_run(context, Storage(context.data_roots), spec, Submission("bulk"))
    first, _ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    plan = trusted_plan(failing, f"{spec.output}/{PLAN}", spec.run, SharedFiles())
    work = ShardWork(context, RunFolder(failing, plan, RunState(redis, spec.run), "e"), 1)
    for index, request in enumerate(work.requests()):
        work.deliver(index, [shout(request)])
    with pytest.raises(kind, match=r"submit again"):
        work.result()
    work.close()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [PLAN, part_name(0)]
    work_off(redis, make_context)
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_file_beyond_what_its_owner_may_write_is_a_full_disk(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.string())])
    batch = pa.record_batch([pa.array([str(number) * 1000 for number in range(1000)])], schema=schema)
    storage = Storage((str(tmp_path),))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(errors.DiskFull):
            write_part(storage, str(tmp_path / "part"), schema, [batch] * 100, some_stats())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def some_stats() -> Any:

    return part_stats("0" * 16, 0, [], generated_tokens=0, started_at=0.0, ended_at=0.0, model=MODEL)


@pytest.mark.parametrize("damage", ["foreign", "cut", "other rows"])
def test_a_damaged_part_is_named_before_the_run_ends(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path, damage: str
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)
    first, second = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    part = tmp_path / "out" / part_name(0)
    if damage == "foreign":
        pq.write_table(pa.table({"a": [1]}), part)
    elif damage == "cut":
        part.write_bytes(part.read_bytes()[:-30])
    else:
        metadata = pq.read_metadata(part).metadata  # ours among it: all but the rows is as it should be
        pq.write_table(pq.read_table(part).slice(1).replace_schema_metadata(metadata), part)
    with pytest.raises(errors.PartDamaged, match=part_name(0)) as caught:
        run_task(make_context(), second.func_name, *second.args)
    assert "leave it out" not in str(caught.value)  # as is said of an input
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    part.unlink()
    redis.flushall()
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)
    work_off(redis, make_context)
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_part_of_no_shard_is_named(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    (tmp_path / "out" / part_name(7)).write_bytes(source.read_bytes())
    with pytest.raises(errors.PartDamaged, match=part_name(7)):
        work_off(redis, make_context)


def test_sampling_that_the_engine_refuses_fails_the_run_and_not_each_row(
    redis: Redis, source: Path, tmp_path: Path
) -> None:
    def refuse_all(sampling: Any) -> None:
        raise ValueError(f"unknown {sorted(sampling)}")

    context = JobContext(redis, "bulk", "j", "e", (str(tmp_path),), MODEL, refuse_all)
    with pytest.raises(ValueError, match="temprature"):
        score_parquet(context, str(source), str(tmp_path / "out"), sampling={"temprature": 1})
    assert queued_jobs(redis) == []


def test_unknown_arguments_fail_like_a_call(context: JobContext, source: Path, tmp_path: Path) -> None:
    error = fails(errors.InvalidJob, context, source, tmp_path / "out", colum="x")
    assert "'colum' is no argument of jobs.score_parquet" in str(error)
    fails(errors.InvalidJob, context, source, tmp_path / "out", queue=3)


def test_sizes_beyond_their_bounds_are_refused_and_say_what_was_found(
    context: JobContext, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(text: str, *, input: Any = source, **arguments: Any) -> None:
        assert text in str(fails(errors.InvalidJob, context, input, tmp_path / "out", **arguments))

    says("1000001, expected an integer from 1 to 1000000", rows_per_shard=1_000_001)
    says("the template has 262145 characters, more than the limit of 262144", template="x" * 262_145)
    messages = [{"role": "user", "content": "x"}]
    says("the template has 101 messages, more than the limit of 100", template=messages * 101)
    long = [{"role": "user", "content": "x" * 262_141}]
    says("the template has 262145 characters, more than the limit of 262144", template=long)
    says("at most 255 characters", prompt_column="x" * 256)
    says("at most 255 characters", queue="x" * 256)
    says("the input names 100001 files, more than the limit of 100000", input=["a"] * 100_001)
    monkeypatch.setattr(spec, "MAX_FILES", 1)
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "other.parquet")
    says("the input names 2 files, more than the limit of 1", input=f"{tmp_path}/*.parquet")
    monkeypatch.setattr(plan, "MAX_SHARDS", 2)
    says("3 rows in 1 files make 3 shards of at most 1 rows, more than the limit of 2", rows_per_shard=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('the patient: {text} {"name": "Ann"}', "field 2 is no plain column name"),
        ("the patient {text.name}", "field 1 is no plain column name"),
        ("the patient {}", "field 1 is no plain column name"),
        ("the patient {" + "x" * 256 + "}", "field 1 is no plain column name"),
        ("the patient {text", "expected '}' before end of string"),
        ("the patient }", "Single '}' encountered"),
    ],
)
def test_what_is_wrong_with_a_template_is_said_without_a_word_of_it(
    context: JobContext, source: Path, tmp_path: Path, text: str, problem: str
) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    for template, where in ((text, "the template: "), (chat, "message 1 of the template: ")):
        error = fails(errors.InvalidJob, context, source, tmp_path / "out", template=template)
        assert f"{where}{problem}" in str(error)
        assert "patient" not in str(error)
        assert 'name"' not in str(error)


def test_a_template_that_a_rows_values_blow_up_fails_that_row_before_it_is_built(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["a", "x" * 200_000]}), tmp_path / "in.parquet")
    template = "{text}" * 40_000  # eight gigabytes, if it were filled
    source, output = tmp_path / "in.parquet", tmp_path / "out"
    score_parquet(make_context(), str(source), str(output), template=template, rows_per_shard=100)
    work_off(redis, make_context)
    fine, refused = pq.read_table(output)["error"].to_pylist()
    assert fine is None
    assert refused == "prompt has 8000000000 characters, more than the limit of 1048576 bytes: shorten it"
