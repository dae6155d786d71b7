"""`--extend` beside kills and workers that thaw: no row is lost, and none of the two ends is a false one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis
from rq.job import Job

from jobs.context import JobContext
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.storage import Storage
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import OpenTask
from tests.jobs.answering import (
    feed,
    opened_task,
    queued_jobs,
)
from tests.jobs.growing_runs import GrowingRun, MakeContext
from tests.jobs.killing import Fuse, FusedRedis, FusedStorage, Killed
from tests.jobs.test_kills import finish, open_work, release_lock


def test_no_kill_of_who_plans_the_first_rows_of_a_run_loses_one(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    step = 0
    while True:
        growing = GrowingRun(redis, make_context, tmp_path / str(step))
        (growing.input / "in.csv").write_text("prompt,id\n")
        growing.run()
        with (growing.input / "in.csv").open("a") as file:
            file.write("p1,1\np2,2\np3,3\n")
        context, fuse = make_context(), Fuse(step)
        spec = RunSpec.from_arguments(
            str(growing.input), str(growing.output), "prompt", None, None, {"seed": 1}, 2
        )
        storage = FusedStorage(context.data_roots, fuse)
        fused = replace(context, connection=FusedRedis(redis, fuse))
        try:
            plan_run(fused, storage, spec, Submission("bulk", extend=True))
            break
        except Killed:
            release_lock(redis, spec)
        growing.extend()
        growing.check(1, 2, 3)
        redis.flushall()
        step += 7
    assert step > 40


def answered_shard(growing: GrowingRun) -> tuple[Job, OpenTask]:
    """Return the job of a run's one shard, and its task with all answers."""
    growing.parquet("a.parquet", 1)
    growing.submit()
    (job,) = queued_jobs(growing.redis)
    task = opened_task(growing.make_context(), job.func_name, job.args, job.kwargs)
    feed(task)
    return job, task


def test_who_ends_the_last_shard_of_before_does_not_end_a_run_that_has_gained_some(
    growing: GrowingRun,
) -> None:
    job, frozen = answered_shard(growing)
    before = frozen._folder.plan  # type: ignore[attr-defined]
    growing.parquet("b.parquet", 2)
    growing.submit(extend=True)
    assert not frozen.result()["run_finished"]
    frozen.close()
    frozen._folder.plan = before  # type: ignore[attr-defined]
    assert not frozen._folder._finish()  # type: ignore[attr-defined]
    assert frozen._folder.plan != before  # type: ignore[attr-defined]
    job.delete()
    growing.work()
    growing.check(1, 2)


def test_who_writes_the_end_while_the_run_is_extended_puts_none_in_place(
    growing: GrowingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, frozen = answered_shard(growing)
    folder = frozen._folder  # type: ignore[attr-defined]
    looked = folder._has_all_parts

    def look_and_freeze() -> bool:
        found: bool = looked()
        if found:
            monkeypatch.undo()
            growing.parquet("b.parquet", 2)
            growing.submit(extend=True)
        return found

    monkeypatch.setattr(folder, "_has_all_parts", look_and_freeze)
    assert not frozen.result()["run_finished"]
    frozen.close()
    assert not (growing.output / "_SUCCESS").exists()
    job.delete()
    growing.work()
    growing.check(1, 2)


def test_no_kill_point_loses_anything_of_a_run_that_is_extended(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    context = make_context()
    storage, step = Storage(context.data_roots), 0
    while True:
        growing = GrowingRun(redis, make_context, tmp_path / str(step))
        growing.lines("a.jsonl", 1, 2, 3)
        spec = RunSpec.from_arguments(str(growing.input), str(growing.output), **growing.arguments)
        plan_and_run(context, storage, spec)
        growing.lines("a.jsonl", 4)
        growing.lines("b.jsonl", 5)
        fuse = Fuse(step)
        fused = replace(context, connection=FusedRedis(redis, fuse))
        try:
            plan_and_run(fused, FusedStorage(context.data_roots, fuse), spec, extend=True)
            break
        except Killed:
            release_lock(redis, spec)
        plan_and_run(context, storage, spec, extend=True)
        growing.check(1, 2, 3, 4, 5)
        redis.flushall()
        step += 11
    assert step > 60


def plan_and_run(context: JobContext, storage: Storage, spec: RunSpec, extend: bool = False) -> None:
    planned = plan_run(context, storage, spec, Submission("bulk", extend=extend))
    for shard in range(planned["shards"]):
        finish(open_work(context, spec, shard, storage))
    assert plan_run(context, storage, spec, Submission("bulk"))["run_finished"]
