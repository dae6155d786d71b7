"""A key of one job that holds another kind of value than RQ's costs that job alone, and comes to an end."""

from datetime import UTC, datetime

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from tests.rq_workers import Workers, leftovers
from tests.worker.stores import (
    claim,
    end_leases,
    failed,
    succeeded,
    take_up_abandoned,
    worker_store,
)
from worker.store.records.claimed_job import ClaimedJob
from worker.store.registries import Registries
from worker.store.scripts import Call, Scripts

KEYS = {
    "hash": "rq:job:{job}",
    "executions": "rq:executions:{job}",
    "execution": "rq:execution:{job}:{execution}",
    "results": "rq:results:{job}",
    "dependents": "rq:job:{job}:dependents",
    "dependencies": "rq:job::{job}:dependencies",
    "group": "rq:group:g",
    "slots": "rq:rl:limit:allowed",
    "limited": "rq:rl:limit:rate_limited",
    "limit": "rq:rl:limit",
}
LOST = ("hash", "executions", "execution")


def the_queue(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


def altered(redis: Redis, name: str, held: ClaimedJob) -> None:
    """Put a text at one of a job's keys."""
    if name == "group":
        redis.hset(f"rq:job:{held.job_id}", mapping={"group_id": "g", "result_ttl": 0})
    if name in ("slots", "limited", "limit"):
        redis.hset(f"rq:job:{held.job_id}", "rate_limit_key", "limit")
        redis.hset("rq:rl:limit", "concurrency", 1)
    redis.set(KEYS[name].format(job=held.job_id, execution=held.execution_id), "a text")


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("end", [succeeded, failed])
def test_a_job_whose_key_is_another_kind_ends_beside_others(
    redis: Redis, name: str, end: object
) -> None:
    queue, store = the_queue(redis), worker_store(redis)
    jobs = [queue.enqueue("jobs.complete", "a", retry=None) for _ in range(3)]
    held = claim(store)
    altered(redis, name, held[1])
    replies = store.finish([end(each) for each in held])  # type: ignore[operator]
    for claimed, reply in zip(held, replies, strict=True):
        if reply == "dependents":
            assert (name, claimed) == ("dependents", held[1])
            with pytest.raises(ResponseError, match="WRONGTYPE"):
                store.queue_dependents(claimed)
            store.close(claimed)
    assert (replies[0], replies[2]) == ("done", "done")
    assert redis.hlen("tokenmill:held:bulk") == 0, f"it would be held for ever: {replies}"
    assert redis.zcard("rq:wip:bulk") == 0
    if name not in LOST:
        status = JobStatus.FINISHED if end is succeeded else JobStatus.FAILED
        assert redis.hget(jobs[1].key, "status") == status.value.encode()
        assert redis.type(f"rq:results:{jobs[1].id}") == b"stream"


@pytest.mark.parametrize("name", KEYS)
def test_a_job_whose_key_is_another_kind_is_taken_from_a_dead_worker_once(
    redis: Redis, name: str
) -> None:
    queue, store = the_queue(redis), worker_store(redis)
    for _ in range(3):
        queue.enqueue("jobs.complete", "a")
    held = claim(store)
    altered(redis, name, held[1])
    end_leases(redis)
    assert take_up_abandoned(worker_store(redis, "other"), ["bulk"]) == []
    assert redis.hlen("tokenmill:held:bulk") == 0
    assert redis.llen("rq:queue:bulk") == (2 if name in ("hash", "executions") else 3)


def test_a_results_stream_that_takes_no_further_entry_begins_anew(redis: Redis) -> None:
    store, job = worker_store(redis), the_queue(redis).enqueue("jobs.complete", "a")
    redis.xadd(f"rq:results:{job.id}", {"type": 1}, id=f"{2**64 - 1}-{2**64 - 1}")
    [held] = claim(store)
    assert store.finish([succeeded(held)]) == ["done"]
    assert job.latest_result().return_value == 1  # type: ignore[union-attr]


def test_a_dependent_that_cannot_be_read_leaves_the_others_of_its_page(redis: Redis) -> None:
    queue, store = the_queue(redis), worker_store(redis)
    first = queue.enqueue("jobs.complete", "a")
    damaged, sound = (queue.enqueue("jobs.complete", "b", depends_on=first) for _ in range(2))
    redis.set(f"rq:job::{damaged.id}:dependencies", "a text")
    [held] = claim(store)
    assert store.finish([succeeded(held)]) == ["dependents"]
    assert store.queue_dependents(held) == 0
    store.close(held)
    assert queue.get_job_ids() == [sound.id]
    assert redis.hlen("tokenmill:held:bulk") == 0


@pytest.mark.parametrize("registry", ["scheduled", "ready"])
def test_what_waits_behind_a_job_that_cannot_be_read_is_queued_in_the_same_call(
    redis: Redis, registry: str
) -> None:
    queue = the_queue(redis)
    past = datetime(2026, 1, 1, tzinfo=UTC)
    damaged, sound = (queue.enqueue_at(past, "jobs.complete", "b") for _ in range(2))
    if registry == "ready":
        redis.zadd("rq:ready:bulk", {damaged.id: 1, sound.id: 2})
        redis.hset(sound.key, "status", "ready_to_enqueue")
    redis.delete(damaged.key)
    redis.set(damaged.key, "a text")
    same = {
        "queue": "bulk",
        "registry": registry,
        "most": 10,
        "now_iso": "2026-01-02T00:00:00Z",
        "now_ts": "1767312000.0",
    }
    Scripts(redis).call_many([Call("enqueue_due", same)])
    assert queue.get_job_ids() == [sound.id]


def test_cleaning_passes_over_what_cannot_be_read(redis: Redis) -> None:
    redis.sadd("rq:groups", "a-text", "sound", "z-text")
    for name in ("a-text", "z-text"):
        redis.set(f"rq:group:{name}", "a text")
    redis.sadd("rq:group:sound", "gone")
    for name in ("a-text", "gone", "z-text"):
        redis.sadd("tokenmill:journals", name)
        redis.set(f"tokenmill:journal:{name}", "kept")
        if name != "gone":
            redis.set(f"rq:job:{name}", "a text")
    redis.zadd("rq:finished:bulk", {"expired": 1})
    Registries(redis).clean(["bulk"])
    assert redis.scard("rq:group:sound") == 0
    assert not list(redis.scan_iter("tokenmill:journal:*"))
    assert redis.zcard("rq:finished:bulk") == 0


def test_a_worker_leaves_behind_no_job_whose_keys_are_another_kind(workers: Workers) -> None:
    queue = workers.queue("bulk")
    jobs = [queue.enqueue("jobs.complete", "a", max_tokens=1) for _ in range(3)]
    workers.redis.set(f"rq:results:{jobs[0].id}", "a text")
    workers.redis.set(jobs[1].dependents_key, "a text")
    log = workers.burst()
    assert [job.get_status() for job in jobs] == [JobStatus.FINISHED] * 3
    assert f"job {jobs[1].id}: its dependents cannot be queued" in log
    assert leftovers(workers.redis, "bulk") == []
