"""Keys of RQ's into which a stranger wrote what nobody can read: they end no worker, and hold up no job."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from redis import Redis
from rq.job import JobStatus

from tests.rq_workers import Workers, leftovers, text_of
from worker.logs import LogStyle
from worker.store.job_store import JobStore
from worker.store.scheduler import Scheduler, SchedulerProcess

NO_TEXT = b"\xff"


def test_an_id_that_is_no_text_is_dropped_from_the_queue_with_a_line_in_the_log(workers: Workers) -> None:
    good = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.redis.hset(b"rq:job:" + NO_TEXT, mapping=workers.redis.hgetall(good.key))
    workers.redis.lpush("rq:queue:bulk", NO_TEXT)
    log = workers.burst()
    assert log.count(r"\xff in rq:queue:bulk: bytes that are no UTF-8") == 1
    [(_, told)] = workers.redis.xrange("tokenmill:quarantine")
    assert told[b"entry"] == NO_TEXT
    assert text_of(workers.result(good)) == "echo:a"
    assert leftovers(workers.redis, "bulk") == []


def test_what_a_dead_worker_held_under_an_id_that_is_no_text_is_let_go(workers: Workers) -> None:
    workers.redis.hset(b"rq:job:" + NO_TEXT, "status", "queued")
    workers.redis.hset("tokenmill:held:bulk", NO_TEXT + b":execution", "|")
    assert JobStore(workers.redis, "w", lease_s=30).reclaim_abandoned(["bulk"], 1, 5) == []
    assert workers.redis.hgetall("tokenmill:held:bulk") == {}


def test_a_dependent_whose_id_is_no_text_holds_up_no_end(workers: Workers) -> None:
    first = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    second = workers.queue("bulk").enqueue("jobs.complete", "b", max_tokens=1, depends_on=first)
    workers.redis.sadd(first.dependents_key, NO_TEXT)
    workers.burst()
    assert text_of(workers.result(second)) == "echo:b"
    assert leftovers(workers.redis, "bulk") == []


def test_a_dependency_whose_status_is_no_text_holds_up_no_end_of_another(workers: Workers) -> None:
    first = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    other = workers.queue("other").enqueue("jobs.complete", "b")
    waiting = workers.queue("bulk").enqueue("jobs.complete", "c", depends_on=[first, other])
    workers.redis.hset(other.key, "status", NO_TEXT)
    workers.burst()
    assert first.get_status() == JobStatus.FINISHED
    assert waiting.get_status() == JobStatus.DEFERRED
    assert leftovers(workers.redis, "bulk") == []


def plant_first_seen(redis: Redis) -> None:
    redis.rpush("rq:queue:bulk:intermediate", "gone")
    redis.set("rq:queue:bulk:intermediate:first_seen:gone", "no moment")


PLANTS: list[Callable[[Redis], object]] = [
    plant_first_seen,
    lambda redis: redis.rpush("rq:queue:bulk:intermediate", NO_TEXT),
    lambda redis: redis.zadd("rq:wip:bulk", {NO_TEXT + b":" + NO_TEXT: 1}),
]


@pytest.mark.parametrize("plant", PLANTS, ids=["first_seen", "intermediate", "started"])
def test_what_stands_among_the_jobs_of_stock_workers_ends_no_worker(
    workers: Workers, plant: Callable[[Redis], object]
) -> None:
    plant(workers.redis)
    job = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.burst()
    assert text_of(workers.result(job)) == "echo:a"
    workers.redis.flushall()


@pytest.mark.parametrize("field", ["meta", "created_at", "timeout"])
def test_a_scheduled_job_that_cannot_be_read_is_queued_and_fails_and_no_other(
    workers: Workers, field: str
) -> None:
    past, queue = datetime(2026, 1, 1, tzinfo=UTC), workers.queue("bulk")
    bad = queue.enqueue_at(past, "jobs.complete", "a", max_tokens=1)
    good = queue.enqueue_at(past, "jobs.complete", "b", max_tokens=1)
    gone = queue.enqueue_at(past, "jobs.complete", "c", max_tokens=1)
    workers.redis.set("rq:job:text", "where RQ keeps a hash")
    workers.redis.zadd(queue.scheduled_job_registry.key, {NO_TEXT: 1, "text": 1})
    workers.redis.delete(gone.key)
    workers.redis.hset(bad.key, field, b"\xff soon")
    workers.burst("--with-scheduler")
    assert text_of(workers.result(good)) == "echo:b"
    assert workers.redis.hget(bad.key, "status") in (b"failed", b"finished")
    assert workers.redis.zcard(queue.scheduled_job_registry.key) == 0
    assert leftovers(workers.redis, "bulk") == []


def test_a_scheduler_that_cannot_be_started_again_is_tried_in_the_next_period(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        exit_status = -9

        def is_alive(self) -> bool:
            return False

    def no_more_files(scheduler: Scheduler) -> SchedulerProcess:
        raise OSError(24, "Too many open files")

    scheduler = Scheduler([workers.queue("bulk")], workers.redis, None, LogStyle(), "worker")
    ended = scheduler._process = Ended()  # type: ignore[assignment]
    monkeypatch.setattr("worker.store.scheduler.SchedulerProcess", no_more_files)
    scheduler.keep_alive()
    assert scheduler._process is ended
    monkeypatch.setattr("worker.store.scheduler.SchedulerProcess", lambda scheduler: "started")
    scheduler.keep_alive()
    assert scheduler._process == "started"
