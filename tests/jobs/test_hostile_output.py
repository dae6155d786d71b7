"""Output folders that are another's, cannot be written, or hold what was damaged: each is named."""

from __future__ import annotations

import errno
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
from jobs.parquet.storage import Storage
from jobs.runs.plans.names import PLAN, part_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.state import RunState
from tests.jobs.answering import (
    MODEL,
    fails,
    queued_jobs,
    run_task,
    score_parquet,
    shout,
    work_off,
)

MakeContext = Callable[[], JobContext]


def test_another_runs_folder_is_refused_and_says_what_differs(
    make_context: MakeContext, redis: Redis, three_rows: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(three_rows), str(tmp_path / "out"))
    work_off(redis, make_context)
    error = fails(
        errors.OutputHoldsAnotherRun, make_context(), three_rows, tmp_path / "out", sampling={"max_tokens": 3}
    )
    assert "sampling" in str(error)
    assert (tmp_path / "out" / part_name(0)).exists()


def test_a_folder_with_other_files_is_refused(context: JobContext, three_rows: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    assert "thesis.txt" in str(fails(errors.OutputHoldsForeignFiles, context, three_rows, tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_damaged_plan_is_named(make_context: MakeContext, three_rows: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PLAN).write_text("{")
    assert PLAN in str(fails(errors.PlanDamaged, make_context(), three_rows, tmp_path / "out"))


def test_a_folder_that_cannot_be_written_is_named(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    fails(errors.OutputNotWritable, context, three_rows, tmp_path / "file" / "out")
    fails(errors.OutputNotWritable, context, three_rows, tmp_path / "file")
    fails(errors.OutputNotWritable, context, three_rows, tmp_path / ("x" * 300))


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
    three_rows: Path,
    tmp_path: Path,
    number: int,
    kind: type[errors.JobsError],
) -> None:
    context = make_context()
    failing = FailingStorage(context.data_roots, number)
    spec = RunSpec.from_arguments(str(three_rows), str(tmp_path / "out"), rows_per_shard=2)
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

    return part_stats("0" * 16, 0, [], generated_tokens=0, times=(0.0, 0.0), model=MODEL)


@pytest.mark.parametrize("damage", ["foreign", "cut", "other rows"])
def test_a_damaged_part_is_named_before_the_run_ends(
    redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path, damage: str
) -> None:
    score_parquet(make_context(), str(three_rows), str(tmp_path / "out"), rows_per_shard=2)
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
    score_parquet(make_context(), str(three_rows), str(tmp_path / "out"), rows_per_shard=2)
    work_off(redis, make_context)
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_part_of_no_shard_is_named(
    redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(three_rows), str(tmp_path / "out"))
    (tmp_path / "out" / part_name(7)).write_bytes(three_rows.read_bytes())
    with pytest.raises(errors.PartDamaged, match=part_name(7)):
        work_off(redis, make_context)
