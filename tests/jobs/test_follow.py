"""`follow` shows a run until it ends, whatever becomes of its shards, its workers and Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis import exceptions as redis_errors
from rq import Queue
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from jobs.common.keys import run_key
from jobs.common.rq_jobs import executions_key
from jobs.context import JobContext
from jobs.runs.plans.names import shard_job_id
from jobs.runs.watching.follow import End, follow
from jobs.runs.watching.snapshot import RunSnapshot, read_snapshot
from tests.jobs.answering import add_worker, fail, queued_jobs, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke
from tests.jobs.test_progress import snapshot

MakeContext = Callable[[], JobContext]


class WorkersClock:
    """A clock whose sleep lets one thing happen at a time, as workers would meanwhile."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self.now = 0.0
        self._events: Iterator[Callable[[], object]] = iter(events)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        next(self._events)()


class Shown:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.warnings: list[str] = []
        self.speeds: list[float] = []

    def show(self, snapshot: RunSnapshot, tokens_per_s: float) -> None:
        self.rows.append(snapshot.rows_done)
        self.speeds.append(tokens_per_s)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_following_shows_rows_and_speed_until_the_run_ends(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    add_worker(redis, "w")
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)["run"]
    shards = [
        lambda job=job: run_task(make_context(), job.func_name, *job.args) for job in queued_jobs(redis)
    ]
    clock, shown = WorkersClock(*shards), Shown()
    followed = follow(lambda: read_snapshot(redis, run), shown, clock, clock.sleep)
    assert followed.end is End.FINISHED
    assert followed.seconds == 1.5
    assert shown.rows == [0, 2, 4, 5]
    assert shown.speeds == [0.0, 4.0, 4.0, pytest.approx(4 / 1.5)]
    assert shown.warnings == []


def test_speed_counts_from_the_end_of_planning_and_is_never_negative(redis: Redis) -> None:
    looks = iter(
        [
            snapshot(tokens=9000, plan_status=JobStatus.STARTED),
            snapshot(tokens=0, plan_status=JobStatus.STARTED),
            snapshot(tokens=5000, plan_status=JobStatus.STARTED),
            snapshot(tokens=5010),
            snapshot(tokens=4000),
            snapshot(tokens=4010),
            snapshot(tokens=4020, finished=True),
        ]
    )
    clock, shown = WorkersClock(*[lambda: None] * 6), Shown()
    follow(lambda: next(looks), shown, clock, clock.sleep)
    assert shown.speeds == [0.0, 0.0, 0.0, 20.0, 0.0, 20.0, 20.0]


def test_following_ends_when_redis_was_flushed(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    clock = WorkersClock(redis.flushall)
    followed = follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep)
    assert followed.end is End.FORGOTTEN


def test_following_keeps_waiting_and_says_that_no_worker_listens(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    redis.sadd("rq:workers:bulk", "rq:worker:dead")  # killed: its key has expired
    events = [
        lambda: None,
        lambda: add_worker(redis, "w"),
        lambda: redis.delete("rq:worker:w"),
        lambda: work_off(redis, make_context),
    ]
    clock, shown = WorkersClock(*events), Shown()
    assert follow(lambda: read_snapshot(redis, run), shown, clock, clock.sleep).end is End.FINISHED
    assert ["no worker" in text for text in shown.warnings] == [True, False, True]
    assert "rq worker" in shown.warnings[0]


def test_following_ends_when_only_failed_shards_are_left(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=3)["run"]
    first, second = queued_jobs(redis)
    events = [
        lambda: fail(redis, first, "DiskFull"),
        lambda: run_task(make_context(), second.func_name, *second.args),
    ]
    clock = WorkersClock(*events)
    followed = follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep)
    assert followed.end is End.SHARDS_FAILED
    assert followed.snapshot.failed_jobs == (shard_job_id(run, 0),)


def test_following_waits_while_a_worker_writes_the_end_or_is_to_be_given_it_anew(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    (job,) = queued_jobs(redis)
    work_off(redis, make_context)
    redis.hdel(run_key(run), "finished")
    redis.zadd(executions_key(job.id), {"execution": 0})  # its part is recorded, and it is not over
    queue = Queue("bulk", connection=redis, serializer=JSONSerializer)
    events = [
        lambda: None,
        lambda: queue.push_job_id(job.id),  # its worker has died
        lambda: redis.delete(executions_key(job.id)),
        lambda: None,
        lambda: redis.hset(run_key(run), "finished", 1),
    ]
    clock = WorkersClock(*events)
    followed = follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep)
    assert followed.end is End.FINISHED


def test_following_ends_when_the_last_shard_died_before_the_end(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    work_off(redis, make_context)
    redis.hdel(run_key(run), "finished")
    clock = WorkersClock(lambda: None, lambda: None)
    followed = follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep)
    assert followed.end is End.STRANDED


def test_following_goes_on_while_shards_wait_inside_a_worker(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=3)["run"]
    jobs = queued_jobs(redis)

    def claim_all() -> None:  # taken from the queue, not begun: in no registry of RQ's
        redis.delete("rq:queue:bulk")
        for job in jobs:
            redis.zadd(f"rq:executions:{job.id}", {"e": 1})

    def finish_all() -> None:
        for job in jobs:
            run_task(make_context(), job.func_name, *job.args)
            redis.delete(f"rq:executions:{job.id}")

    clock = WorkersClock(claim_all, lambda: None, lambda: None, finish_all)
    assert follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep).end is End.FINISHED


def test_a_run_that_is_submitted_again_while_its_shards_run_is_shown_as_running() -> None:
    assert snapshot(plan_status=JobStatus.QUEUED).state == "running"
    assert snapshot(plan_status=JobStatus.QUEUED, started=0).state == "planning"


def test_following_ends_when_someone_emptied_the_queue(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path, invoke: Invoke
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    planned = invoke("submit", source, tmp_path / "other").stdout.strip()
    clock = WorkersClock(Queue("bulk", redis, serializer=JSONSerializer).empty, lambda: None, lambda: None)
    for name in (run, planned):
        followed = follow(lambda name=name: read_snapshot(redis, name), Shown(), clock, clock.sleep)
        assert followed.end is End.STRANDED


def test_following_outlives_an_outage_of_redis(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    add_worker(redis, "w")
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    away = False

    def look() -> RunSnapshot:
        if away:
            raise redis_errors.ConnectionError("refused")
        return read_snapshot(redis, run)

    def goes() -> None:
        nonlocal away
        away = True

    def comes_back() -> None:
        nonlocal away
        away = False
        work_off(redis, make_context)

    clock, shown = WorkersClock(goes, lambda: None, comes_back), Shown()
    assert follow(look, shown, clock, clock.sleep).end is End.FINISHED
    assert ["no answer" in text for text in shown.warnings] == [True]
