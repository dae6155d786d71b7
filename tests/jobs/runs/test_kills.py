"""Wherever an execution is killed, or met by another, each row is written once and the run ends."""

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from jobs.errors import RunCancelled
from jobs.parquet.files.storage import Storage
from jobs.runs.plans.names import PLAN, keys_name, part_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.shard_jobs import enqueue_shards
from jobs.runs.redis_state.state import RunState
from tests.jobs.answering import run_task, shout
from tests.jobs.killing import RECOVERIES, Executions, Fuse, finish, recover, run_until_killed
from tests.jobs.local_runs import Runs

ENDED = {"_keys", "_plan.json", "_manifest.json", "_report.html", "_SUCCESS"}
ROWS = 5


@pytest.fixture
def spec(runs: Runs) -> RunSpec:
    source = runs.write([f"p{number}" for number in range(ROWS)], row_group_size=2)
    greedy = {"temperature": 0}
    return RunSpec.from_arguments(str(source), str(runs.output), sampling=greedy, rows_per_shard=2)


class Site(Executions):
    """Of a run of three shards."""

    def check_finished(self) -> None:
        names = {path.name for path in self.runs.output.iterdir()}
        assert names == {part_name(n) for n in range(3)} | ENDED
        rows = [(row["id"], row["completion"]) for row in self.runs.rows()]
        assert rows == [(n, f"P{n}") for n in range(ROWS)]
        assert (self.runs.manifest["rows"], len(self.runs.manifest["parts"])) == (ROWS, 3)


@pytest.fixture
def site(runs: Runs, spec: RunSpec) -> Site:
    return Site(runs, spec)


@pytest.fixture
def planned(site: Site) -> Site:
    site.plan()
    return site


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.long)])
def test_no_kill_point_strands_a_run(redis: Redis, site: Site, stride: int) -> None:
    stride = 13 if os.environ.get("SLOW_FILES_S") else stride
    step = 0
    while (finished := run_until_killed(site.runs.context(), site.spec, Fuse(step))) is not None:
        recover(redis, site.runs, site.spec, RECOVERIES[step // stride % 3], finished)
        site.check_finished()
        assert "finished" in RunState(redis, site.spec.run).facts()
        redis.flushall()
        shutil.rmtree(site.spec.output)
        step += stride
    assert step > 60


def test_of_two_executions_the_first_one_wins(planned: Site) -> None:
    slow, fast = planned.open(0), planned.open(0)
    finish(fast)
    part = planned.runs.output / part_name(0)
    before = part.stat()
    for index, request in enumerate(slow.requests()):
        slow.deliver(index, [replace(shout(request), text="late")])
    slow.result()
    slow.close()
    assert (part.stat().st_ino, part.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    planned.runs.work()
    planned.check_finished()


def test_a_loser_whose_file_the_finisher_removed_gives_way(planned: Site) -> None:
    class RunEndsBeforePublishing(Storage):
        def publish(self, temporary: str, target: str) -> bool:
            planned.runs.work()
            return super().publish(temporary, target)

    finish(planned.open(0, RunEndsBeforePublishing))
    planned.check_finished()


def test_a_planner_that_slept_while_another_planned_and_parts_came_takes_its_plan(
    site: Site,
) -> None:
    class SleepsBeforeTheFolder(Storage):
        def make_folder(self, path: str) -> None:
            super().make_folder(path)
            site.plan()
            site.runs.run(site.runs.jobs[0])

    assert site.plan(SleepsBeforeTheFolder)["shards_missing"] == 2
    site.runs.work()
    site.check_finished()


def test_a_part_that_is_there_is_not_computed_again(planned: Site) -> None:
    finish(planned.open(1))
    again = planned.open(1)
    assert list(again.requests()) == []
    assert again.progress() == {
        "rows": 2,
        "rows_done": 2,
        "rows_open": 0,
        "prompt_tokens": 0,
        "tokens": 0,
    }
    finish(again)


def test_contents_reach_the_disk_before_their_name_and_the_name_before_the_count(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    sync = os.fsync

    def note_sync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).removesuffix(".tmp")
        calls.append(("sync", name.split(".", 2)[-1]))
        sync(descriptor)

    link = os.link

    def note_link(temporary: str, target: str, **options: Any) -> None:
        calls.append(("name", target))
        link(temporary, target, **options)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note_link)
    site.plan()
    site.runs.work()
    keys = [(keys_name(shard).rpartition("/")[2], "_keys") for shard in range(3)]
    parts = [(part_name(shard), "out") for shard in range(3)]
    written = [(PLAN, "out"), *(each for pair in zip(keys, parts, strict=True) for each in pair)]
    written += [("_report.html", "out"), ("_manifest.json", "out")]
    steps = [
        step
        for name, folder in written
        for step in (("sync", name), ("name", name), ("sync", folder))
    ]
    assert calls == [*steps, ("sync", "out")]  # and the folder of the empty mark


def test_planners_at_once_agree_on_one_plan_and_enqueue_each_shard_once(runs: Runs) -> None:
    runs.write([f"p{number}" for number in range(60)], row_group_size=7)
    together = threading.Barrier(4)

    def plan(_: int) -> int:
        together.wait(timeout=30)
        return int(runs.plan(rows_per_shard=2)["shards_enqueued"])

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(plan, range(4))) == 30
    assert len({job.id for job in runs.jobs}) == len(runs.jobs) == 30


def test_workers_that_share_a_run_and_repeat_each_others_shards_write_each_row_once(
    runs: Runs,
) -> None:
    runs.write([f"p{number}" for number in range(60)], row_group_size=7)
    runs.plan(rows_per_shard=3)
    jobs = runs.jobs
    with ThreadPoolExecutor(4) as pool:
        work = [
            pool.submit(run_task, runs.context(), job.func_name, *job.args)
            for job in (*jobs, *reversed(jobs), *jobs)
        ]
        assert any(future.result(timeout=60)["run_finished"] for future in work)
    assert [(row["id"], row["completion"]) for row in runs.rows()] == [
        (n, f"P{n}") for n in range(60)
    ]
    assert (runs.output / "_SUCCESS").exists()
    assert not list(runs.output.glob("_tmp.*"))


def enqueue_again(redis: Redis, planned: Site, state: type[RunState]) -> int:
    """Enqueue the first shard of a run with another kind of state."""
    plan = planned.open(0)._folder.plan
    return enqueue_shards(planned.runs.context(), "bulk", plan, state(redis, plan.run), [0])


class IsSlow(RunState):
    """Sleeps once between its look and what it writes."""

    meanwhile: Callable[[RunState], object]

    def submission(self) -> int:
        found, meanwhile = super().submission(), IsSlow.meanwhile
        IsSlow.meanwhile = lambda state: None
        meanwhile(RunState(self.connection, self.run))
        return found


def test_a_slow_planner_enqueues_nothing_that_another_has_enqueued_meanwhile(
    redis: Redis, planned: Site
) -> None:
    def plan(state: RunState) -> None:
        assert enqueue_again(redis, planned, RunState) == 1

    redis.delete("rq:queue:bulk")
    IsSlow.meanwhile = plan
    assert enqueue_again(redis, planned, IsSlow) == 0
    assert len(planned.runs.jobs) == 1


def test_a_slow_planner_sees_what_was_cancelled_meanwhile(redis: Redis, planned: Site) -> None:
    redis.delete("rq:queue:bulk")
    IsSlow.meanwhile = lambda state: state.cancel(state.submission())
    with pytest.raises(RunCancelled):
        enqueue_again(redis, planned, IsSlow)
    assert planned.runs.jobs == []
