"""Wherever an execution is killed, running what is left, or planning again, ends the run."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.job import Job

from jobs.common.keys import run_lock_key, run_parts_key
from jobs.context import JobContext
from jobs.context.shared_files import SharedFiles
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.run_folder import RunFolder
from jobs.parquet.shard_work import ShardWork, trusted_plan
from jobs.parquet.storage import Storage
from jobs.runs.plans.names import PLAN, part_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.state import RunState
from tests.jobs.answering import queued_jobs, run_task, score_parquet, shout, work_off
from tests.jobs.killing import Fuse, FusedRedis, FusedStorage, Killed

ENDED = {"_plan.json", "_manifest.json", "_report.html", "_SUCCESS"}
MakeContext = Callable[[], JobContext]
ROWS = 5


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    table = pa.table({"prompt": [f"p{number}" for number in range(ROWS)], "id": range(ROWS)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    return RunSpec.from_arguments(
        str(tmp_path / "in.parquet"), str(tmp_path / "out"), sampling={"temperature": 0}, rows_per_shard=2
    )


def open_work(context: JobContext, spec: RunSpec, shard: int, storage: Storage) -> ShardWork:
    plan = trusted_plan(storage, f"{spec.output}/{PLAN}", spec.run, SharedFiles())
    state = RunState(context.connection, spec.run)
    return ShardWork(context, RunFolder(storage, plan, state, context.execution_id), shard)


def finish(work: ShardWork) -> None:
    for index, request in enumerate(work.requests()):
        work.deliver(index, [shout(request)])
    work.result()
    work.close()


def run_until_killed(context: JobContext, spec: RunSpec, fuse: Fuse) -> int | None:
    """Plan, then score all shards, as one process; return how many were finished if it was killed."""
    finished = 0
    fused = replace(context, connection=FusedRedis(context.connection, fuse))
    storage = FusedStorage(context.data_roots, fuse)
    try:
        plan_run(fused, storage, spec, Submission("bulk"))
        for shard in range(3):
            finish(open_work(fused, spec, shard, storage))
            finished += 1
    except Killed:
        return finished
    return None


def release_lock(redis: Redis, spec: RunSpec) -> None:
    """Let the dead process's lock expire."""
    if redis.exists(run_lock_key(spec.run)):
        assert 0 < redis.ttl(run_lock_key(spec.run)) <= 10
        redis.delete(run_lock_key(spec.run))


def assert_finished(spec: RunSpec) -> None:
    output = Path(spec.output)
    names = {path.name for path in output.iterdir()}
    assert names == {part_name(n) for n in range(3)} | ENDED
    rows = pq.read_table(output).to_pylist()
    assert [(row["id"], row["completion"]) for row in rows] == [(n, f"P{n}") for n in range(ROWS)]
    manifest = json.loads((output / "_manifest.json").read_text())
    assert (manifest["rows"], len(manifest["parts"])) == (ROWS, 3)


@pytest.mark.parametrize(
    "recovery", ["unfinished jobs run again", "planned again", "planned again without redis"]
)
def test_no_kill_point_strands_a_run(
    redis: Redis, make_context: MakeContext, spec: RunSpec, recovery: str
) -> None:
    step = 0
    while (finished := run_until_killed(make_context(), spec, Fuse(step))) is not None:
        release_lock(redis, spec)
        recover(redis, make_context, spec, recovery, finished)
        assert_finished(spec)
        assert "finished" in RunState(redis, spec.run).facts()
        redis.flushall()
        shutil.rmtree(spec.output)
        step += 1
    assert step > 60


def recover(redis: Redis, make_context: MakeContext, spec: RunSpec, recovery: str, finished: int) -> None:
    for job in queued_jobs(redis)[:finished]:
        job.delete()
    if recovery == "planned again without redis":
        redis.flushall()
    planned_whole = finished > 0 or len(queued_jobs(redis)) == 3
    if recovery == "unfinished jobs run again" and planned_whole:
        work_off(redis, make_context)
        return
    plan_run(make_context(), Storage((str(Path(spec.output).parent),)), spec, Submission("bulk"))
    work_off(redis, make_context)


def test_of_two_executions_the_first_one_wins(redis: Redis, make_context: MakeContext, spec: RunSpec) -> None:
    storage = Storage(make_context().data_roots)
    plan_run(make_context(), storage, spec, Submission("bulk"))
    slow, fast = (open_work(make_context(), spec, 0, storage) for _ in range(2))
    finish(fast)
    before = (Path(spec.output) / part_name(0)).stat()
    for index, _ in enumerate(slow.requests()):
        slow.deliver(index, [replace(shout(_), text="late")])
    slow.result()
    slow.close()
    after = (Path(spec.output) / part_name(0)).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    work_off(redis, make_context)
    assert_finished(spec)


def test_a_loser_whose_file_the_finisher_removed_gives_way(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    storage = Storage(make_context().data_roots)
    plan_run(make_context(), storage, spec, Submission("bulk"))

    class RunEndsBeforePublishing(Storage):
        def publish(self, temporary: str, target: str) -> bool:
            work_off(redis, make_context)
            return super().publish(temporary, target)

    finish(open_work(make_context(), spec, 0, RunEndsBeforePublishing(make_context().data_roots)))
    assert_finished(spec)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOSPC])
def test_a_loser_that_cannot_write_any_more_gives_way(
    redis: Redis, make_context: MakeContext, spec: RunSpec, number: int
) -> None:
    plan_run(make_context(), Storage(make_context().data_roots), spec, Submission("bulk"))

    class RunEndsWhileWriting(Storage):
        def open_output(self, path: str) -> Any:
            work_off(redis, make_context)
            raise OSError(number, os.strerror(number))

    finish(open_work(make_context(), spec, 0, RunEndsWhileWriting(make_context().data_roots)))
    assert_finished(spec)


def test_a_straggler_that_finds_its_part_there_writes_nothing(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    plan_run(make_context(), Storage(make_context().data_roots), spec, Submission("bulk"))

    class ReadOnly(Storage):
        def open_output(self, path: str) -> Any:
            raise AssertionError(f"it writes {path}")

    straggler = open_work(make_context(), spec, 0, ReadOnly(make_context().data_roots))
    work_off(redis, make_context)
    finish(straggler)
    assert_finished(spec)


@pytest.mark.parametrize("next_one", ["a submitter", "a straggler"])
def test_the_file_of_a_straggler_killed_after_its_run_ended_is_removed_by_the_next_to_look(
    redis: Redis, make_context: MakeContext, spec: RunSpec, next_one: str
) -> None:
    storage = Storage(make_context().data_roots)
    plan_run(make_context(), storage, spec, Submission("bulk"))

    class KilledInAFinishedRun(Storage):
        def open_output(self, path: str) -> Any:
            work_off(redis, make_context)
            return super().open_output(path)

        def publish(self, temporary: str, target: str) -> bool:
            raise Killed

    killed = open_work(make_context(), spec, 0, KilledInAFinishedRun(make_context().data_roots))
    straggler = open_work(make_context(), spec, 1, storage)
    with pytest.raises(Killed):
        finish(killed)
    assert [path.name for path in Path(spec.output).glob("_tmp.*")] == [
        "_tmp.execution2.part-00000.parquet.tmp"
    ]
    if next_one == "a submitter":
        plan_run(make_context(), storage, spec, Submission("bulk"))
    else:
        finish(straggler)
    assert_finished(spec)


def test_a_planner_that_slept_while_another_planned_and_parts_came_takes_its_plan(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    class SleepsBeforeTheFolder(Storage):
        def make_folder(self, path: str) -> None:
            super().make_folder(path)
            plan_run(make_context(), Storage(make_context().data_roots), spec, Submission("bulk"))
            first, *_ = queued_jobs(redis)
            run_task(make_context(), first.func_name, *first.args)

    slow = plan_run(
        make_context(), SleepsBeforeTheFolder(make_context().data_roots), spec, Submission("bulk")
    )
    assert slow["shards_missing"] == 2
    work_off(redis, make_context)
    assert_finished(spec)


def test_a_planner_that_slept_while_another_planned_and_the_run_ended_leaves_its_end_alone(
    redis: Redis, make_context: MakeContext, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has listed the parts before any was there, and is interrupted before it counts them."""
    list_parts = RunFolder._numbers_of_parts

    def sleep_after_the_listing(folder: RunFolder) -> set[int]:
        monkeypatch.setattr(RunFolder, "_numbers_of_parts", list_parts)
        found = list_parts(folder)
        score_parquet(make_context(), spec.input[0], spec.output, sampling=spec.sampling, rows_per_shard=2)
        work_off(redis, make_context)
        assert_finished(spec)
        return found

    def interrupted(*args: Any) -> bool:
        raise Killed

    context = make_context()
    recount = RunFolder.recount
    monkeypatch.setattr(RunFolder, "_numbers_of_parts", sleep_after_the_listing)
    monkeypatch.setattr(
        RunFolder,
        "recount",
        lambda folder, *args: (interrupted if folder._execution_id == context.execution_id else recount)(
            folder, *args
        ),
    )
    with pytest.raises(Killed):
        plan_run(context, Storage(context.data_roots), spec, Submission("bulk"))
    assert_finished(spec)


def test_of_two_that_end_a_run_at_once_neither_trips_over_the_others_cleaning(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    plan_run(make_context(), Storage(make_context().data_roots), spec, Submission("bulk"))

    class CleanedByAnother(Storage):
        cleaned = 0

        def replace(self, temporary: str, target: str) -> bool:
            if self.cleaned < 2:
                self.cleaned += 1
                self.delete(temporary)
            return super().replace(temporary, target)

    storage = CleanedByAnother(make_context().data_roots)
    for shard in range(3):
        finish(open_work(make_context(), spec, shard, storage))
    assert storage.cleaned == 2
    assert_finished(spec)


def test_a_part_that_is_there_is_not_computed_again(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    storage = Storage(make_context().data_roots)
    plan_run(make_context(), storage, spec, Submission("bulk"))
    finish(open_work(make_context(), spec, 1, storage))
    again = open_work(make_context(), spec, 1, storage)
    assert list(again.requests()) == []
    assert again.progress() == {"rows": 2, "rows_done": 2, "rows_open": 0, "prompt_tokens": 0, "tokens": 0}
    finish(again)


def test_the_count_survives_redis_losing_it_in_between(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    plan_run(make_context(), Storage(make_context().data_roots), spec, Submission("bulk"))
    first, *rest = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    redis.delete(run_parts_key(spec.run))
    results = [run_task(make_context(), job.func_name, *job.args) for job in rest]
    assert [result["run_finished"] for result in results] == [False, True]
    assert_finished(spec)


def test_a_part_deleted_by_hand_is_scored_again(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    storage = Storage(make_context().data_roots)
    plan_run(make_context(), storage, spec, Submission("bulk"))
    work_off(redis, make_context)
    (Path(spec.output) / part_name(1)).unlink()
    assert plan_run(make_context(), storage, spec, Submission("bulk"))["shards_enqueued"] == 1
    assert RunState(redis, spec.run).parts().keys() == {0, 2}
    assert not (Path(spec.output) / "_SUCCESS").exists()
    work_off(redis, make_context)
    assert_finished(spec)


def test_contents_reach_the_disk_before_their_name_and_the_name_before_the_count(
    redis: Redis, make_context: MakeContext, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    sync, link, put = os.fsync, os.link, os.replace

    def note_sync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).removesuffix(".tmp")
        calls.append(("sync", name.split(".", 2)[-1]))
        sync(descriptor)

    def note(kind: str, move: Callable[..., None]) -> Callable[..., None]:
        def noted(temporary: str, target: str, **options: Any) -> None:
            calls.append((kind, target))
            move(temporary, target, **options)

        return noted

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note("name", link))
    monkeypatch.setattr(os, "replace", note("name", put))
    plan_run(make_context(), Storage(make_context().data_roots), spec, Submission("bulk"))
    work_off(redis, make_context)
    names = [PLAN, *map(part_name, range(3)), "_report.html", "_manifest.json", "_SUCCESS"]
    assert calls == [step for name in names for step in (("sync", name), ("name", name), ("sync", "out"))]


def test_a_failed_run_is_resumed_through_the_public_function(
    redis: Redis, make_context: MakeContext, spec: RunSpec
) -> None:
    arguments = {key: value for key, value in spec.to_json().items() if value is not None}
    score_parquet(make_context(), **arguments)
    first, second, _ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    redis.delete("rq:queue:bulk")
    redis.hset(Job.key_for(first.id), "status", "finished")
    redis.hset(Job.key_for(second.id), "status", "failed")
    redis.zadd("rq:failed:bulk", {second.id: 1})
    assert score_parquet(make_context(), **arguments)["shards_enqueued"] == 2
    assert redis.zcard("rq:failed:bulk") == 0
    work_off(redis, make_context)
    assert_finished(spec)
