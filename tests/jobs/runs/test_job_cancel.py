"""One job is cancelled: what waits goes, what runs is told to stop."""

from datetime import timedelta

import pytest
from redis import Redis
from rq import Queue, RateLimit

from jobs.runs import job_cancel as module
from jobs.runs.job_cancel import JobCancel, cancel_job


def held(redis: Redis, job_id: str, worker: str = "node-1") -> None:
    """Write what a claim writes of an execution."""
    redis.zadd(f"rq:executions:{job_id}", {"e1": 1})
    redis.hset(f"rq:execution:{job_id}:e1", "worker_name", worker)


def test_a_job_that_waits_is_taken_from_there_as_rq_does(redis: Redis) -> None:
    queue = Queue("bulk", connection=redis, serializer="json")
    first = queue.enqueue("jobs.complete", "x", job_id="first")
    after = queue.enqueue("jobs.complete", "x", job_id="after", depends_on=first)
    later = queue.enqueue_in(timedelta(hours=1), "jobs.complete", "x", job_id="later")
    limit = RateLimit("one", 1)
    slot, limited = (
        queue.enqueue("jobs.complete", job_id=each, rate_limit=limit)
        for each in ("slot", "limited")
    )
    ready = queue.enqueue("jobs.complete", job_id="ready", depends_on=first)
    with redis.pipeline() as pipe:
        queue.ready_job_registry.register_jobs([ready], pipe)
        pipe.execute()
    redis.hset("rq:job:first", "data", b"no payload that anybody could read")
    for job in (after, later, limited, ready, slot, first):
        assert cancel_job(redis, job.id) is JobCancel.REMOVED
        assert redis.hget(f"rq:job:{job.id}", "status") == b"canceled"
        assert cancel_job(redis, job.id) is JobCancel.GONE
    assert queue.job_ids == []
    for registry in (
        queue.deferred_job_registry,
        queue.scheduled_job_registry,
        queue.ready_job_registry,
    ):
        assert registry.get_job_ids(cleanup=False) == []
    assert not redis.exists("rq:rl:one:rate_limited")
    assert queue.canceled_job_registry.count == 6
    assert cancel_job(redis, "none") is JobCancel.GONE


def test_a_job_that_is_claimed_in_between_is_told_to_stop(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue("bulk", connection=redis, serializer="json")
    queue.enqueue("jobs.complete", "x", job_id="one")
    cancel_waiting = module._cancel_waiting

    def claimed_first(job_id: str, pipe: object) -> bool | None:
        if not redis.exists("rq:executions:one"):
            redis.lrem("rq:queue:bulk", 1, "one")
            held(redis, "one")
        return cancel_waiting(job_id, pipe)

    monkeypatch.setattr(module, "_cancel_waiting", claimed_first)
    assert cancel_job(redis, "one") is JobCancel.STOPPING
    assert redis.zscore("rq:canceled:bulk", "one") is None
