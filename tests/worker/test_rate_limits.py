"""Jobs that a client of RQ 3 has put behind a rate limit do not wait for ever.

RQ 2.12, with which the tests run, knows no rate limits: jobs are put there as RQ 3's `Queue.enqueue` does.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from rq import Queue, Retry
from rq.job import Job, JobStatus

from tests.rq_workers import Workers, wait_until, wait_until_started

F = "tests.worker.functions."
_order = count()


def enqueue_rate_limited(queue: Queue, function: str, *args: Any, **options: Any) -> Job:
    """As `queue.enqueue(..., rate_limit=RateLimit("key", 1))`."""
    redis = queue.connection
    job = queue.create_job(F + function, args=args, timeout=60, **options)
    job.origin = queue.name
    job.save()
    redis.hset(job.key, mapping={"rate_limit_key": "key", "rate_limit_concurrency": 1})
    redis.sadd("rq:rl-keys", "key")
    redis.hset("rq:rl:key", "concurrency", 1)
    redis.sadd("rq:queues", queue.key)
    if redis.zcard("rq:rl:key:allowed"):
        redis.hset(job.key, "status", "rate_limited")
        redis.zadd("rq:rl:key:rate_limited", {job.id: next(_order)})
    else:
        redis.hset(job.key, "status", "queued")
        redis.zadd("rq:rl:key:allowed", {job.id: next(_order)})
        redis.rpush(queue.key, job.id)
    return job


def assert_no_limit_is_left(workers: Workers) -> None:
    assert workers.redis.zcard("rq:rl:key:allowed") == 0
    assert workers.redis.zcard("rq:rl:key:rate_limited") == 0


@pytest.mark.parametrize("options", [{}, {"result_ttl": 0}, {"failure_ttl": 0}], ids=str)
def test_jobs_of_one_limit_follow_each_other_whatever_becomes_of_them(
    workers: Workers, options: dict[str, int]
) -> None:
    queue = workers.queue("bulk")
    enqueue_rate_limited(queue, "add", 1, 1, **options)
    enqueue_rate_limited(queue, "boom", "no", **options)
    enqueue_rate_limited(queue, "boom", "no", retry=Retry(max=2), **options)
    enqueue_rate_limited(queue, "always_ask_for_retry", 1, **options)
    last = enqueue_rate_limited(queue, "add", 1, 2)
    workers.burst()
    assert workers.result(last).return_value == 3
    assert_no_limit_is_left(workers)


def test_a_job_that_is_retried_later_gives_its_slot_to_the_next(workers: Workers) -> None:
    queue = workers.queue("bulk")
    later = enqueue_rate_limited(queue, "boom", "no", retry=Retry(max=1, interval=600))
    last = enqueue_rate_limited(queue, "add", 1, 2)
    workers.burst()
    assert later.get_status() == JobStatus.SCHEDULED
    assert workers.result(last).return_value == 3


def test_no_more_jobs_of_a_limit_run_than_it_allows(workers: Workers) -> None:
    queue = workers.queue("bulk")
    jobs = [enqueue_rate_limited(queue, "meet", "gate") for _ in range(3)]
    workers.start()
    for number, job in enumerate(jobs):
        assert workers.wait_for("gate:waiting") == job.id
        assert workers.redis.llen("gate:waiting") == 0
        workers.redis.rpush("gate", f"go{number}")
        assert workers.result(job).return_value == f"go{number}"


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_the_slot_of_a_running_job_that_is_given_up_goes_to_the_next(workers: Workers, how: str) -> None:
    queue = workers.queue("bulk")
    running, waiting = (enqueue_rate_limited(queue, "linger"), enqueue_rate_limited(queue, "add", 1, 2))
    workers.start()
    wait_until_started(running)
    getattr(running, how)()
    assert workers.result(waiting).return_value == 3


def test_a_dependent_with_a_limit_waits_for_its_slot(workers: Workers) -> None:
    queue = workers.queue("bulk")
    parent = queue.enqueue(F + "add", 1, 1)
    child = queue.enqueue(F + "add", 1, 2, depends_on=parent)
    workers.redis.hset(child.key, mapping={"rate_limit_key": "key", "rate_limit_concurrency": 1})
    blocking = enqueue_rate_limited(workers.queue("other"), "add", 1, 1)
    workers.burst()
    assert workers.redis.hget(child.key, "status") == b"rate_limited"
    assert workers.redis.zrange("rq:rl:key:rate_limited", 0, -1) == [child.id.encode()]
    workers.burst(queues=("bulk", "other"))
    assert workers.result(blocking).return_value == 2
    assert workers.result(child).return_value == 3
    wait_until(lambda: workers.redis.zcard("rq:rl:key:allowed") == 0)


def test_a_limit_without_jobs_is_forgotten(workers: Workers) -> None:
    gone = enqueue_rate_limited(workers.queue("bulk"), "add", 1, 1)
    workers.redis.delete(gone.key, "rq:queue:bulk")
    process = workers.start()
    wait_until(lambda: workers.redis.keys("rq:rl*") == [])
    process.terminate()
    assert process.wait(timeout=60) == 0
