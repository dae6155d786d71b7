"""The queue in Redis: one worker puts it in order for all, and loses no job that comes or goes meanwhile."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from jobs.common.keys import run_key
from jobs.runs.plans.names import plan_job_id, shard_job_id
from tests.rq_workers import Workers, wait_until
from worker.store.queue_order import MAX_ORDERED_JOBS, PERIOD_S, QueueOrder
from worker.store.scripts import Call, Scripts

A = "a" * 16
B = "b" * 16
QUEUE = "rq:queue:bulk"


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ordering(redis: Redis, clock: Clock) -> QueueOrder:
    return QueueOrder(redis, clock)


def enqueue(redis: Redis, run: str, shards: range, rows: int = 1000, **facts: Any) -> list[str]:
    """Leave a run's shards in the queue, as its planning does."""
    redis.hset(run_key(run), mapping={"rows": rows * len(shards), "shards": len(shards), **facts})
    ids = [shard_job_id(run, shard) for shard in shards]
    redis.rpush(QUEUE, *ids)
    return ids


def queued(redis: Redis) -> list[str]:
    entries: Any = redis.lrange(QUEUE, 0, -1)
    return [entry.decode() for entry in entries]


def look(redis: Redis, ordering: QueueOrder) -> list[str]:
    redis.delete("tokenmill:fair-turn:bulk")
    ordering.put_in_order(["bulk"])
    return queued(redis)


def test_a_second_run_gets_every_second_place_and_keeps_it_while_shards_are_claimed(
    redis: Redis, ordering: QueueOrder
) -> None:
    first = enqueue(redis, A, range(4))
    assert look(redis, ordering) == first
    second = enqueue(redis, B, range(3))
    expected = [first[0], second[0], first[1], second[1], first[2], second[2], first[3]]
    assert look(redis, ordering) == expected
    redis.lpop(QUEUE)
    assert look(redis, ordering) == expected[1:], (
        "the run whose shard was claimed is not first again"
    )


def test_a_run_that_comes_later_is_planned_first(redis: Redis, ordering: QueueOrder) -> None:
    first = enqueue(redis, A, range(3))
    look(redis, ordering)
    redis.rpush(QUEUE, plan_job_id(B))
    assert look(redis, ordering) == [plan_job_id(B), *first]


def test_prompts_do_not_wait_behind_a_run(redis: Redis, ordering: QueueOrder) -> None:
    shards = enqueue(redis, A, range(3))
    redis.rpush(QUEUE, "prompt-1", "prompt-2")
    assert look(redis, ordering) == ["prompt-1", "prompt-2", *shards]


def test_a_run_whose_deadline_would_be_missed_comes_first_once_the_rate_is_known(
    redis: Redis, ordering: QueueOrder, clock: Clock
) -> None:
    big = enqueue(redis, A, range(60), total_rows=0)
    late = enqueue(redis, B, range(10), deadline=clock.now + 700)
    for step in range(3):  # 20 rows a second
        look(redis, ordering)
        clock.now += PERIOD_S
        redis.hset(run_key(A), "total_rows", 100 * (step + 1))
    order = look(redis, ordering)
    assert order[:9] == late[:9]
    assert order[9] == big[0]


def test_a_run_with_priority_3_gets_three_times_the_places(
    redis: Redis, ordering: QueueOrder
) -> None:
    enqueue(redis, A, range(20))
    favoured = enqueue(redis, B, range(20), priority=3)
    order = look(redis, ordering)
    assert sum(job_id in favoured for job_id in order[:16]) == 12


@pytest.mark.parametrize("priority", [b"", b"-3", b"nan", b"9" * 400])
def test_a_priority_that_cannot_be_read_keeps_no_run_from_its_turn(
    redis: Redis, ordering: QueueOrder, priority: bytes
) -> None:
    others = enqueue(redis, A, range(110), rows=10)
    odd = enqueue(redis, B, range(110), rows=10, priority=priority)
    order = look(redis, ordering)
    assert sorted(order) == sorted(others + odd)
    assert {job_id in others for job_id in order[:102]} == {True, False}


def test_a_new_priority_counts_for_shards_that_have_their_places(
    redis: Redis, ordering: QueueOrder
) -> None:
    enqueue(redis, A, range(20))
    favoured = enqueue(redis, B, range(20))
    look(redis, ordering)
    redis.hset(run_key(B), "priority", 3)
    order = look(redis, ordering)
    assert sum(job_id in favoured for job_id in order[:16]) == 12


def test_only_one_worker_looks_in_each_period(redis: Redis, ordering: QueueOrder) -> None:
    first = enqueue(redis, A, range(2))
    ordering.put_in_order(["bulk"])
    second = enqueue(redis, B, range(2))
    QueueOrder(redis).put_in_order(["bulk"])
    assert queued(redis) == first + second
    assert 0 < (redis.pttl("tokenmill:fair-turn:bulk") or 0) <= PERIOD_S * 1000  # type: ignore[operator]


@pytest.mark.parametrize("value", [b"\xff", b"[]", b'{"last": 3}', b'{"samples": [[1]]}'])
def test_a_memory_that_cannot_be_read_is_none(
    redis: Redis, ordering: QueueOrder, value: bytes
) -> None:
    redis.set("tokenmill:fair:bulk", value)
    first = enqueue(redis, A, range(2))
    second = enqueue(redis, B, range(1))
    assert look(redis, ordering) == [first[0], second[0], first[1]]


def test_a_run_whose_key_is_something_else_is_shared_with_too(
    redis: Redis, ordering: QueueOrder
) -> None:
    redis.set(run_key(A), "no hash")
    ids = [shard_job_id(A, shard) for shard in range(2)]
    redis.rpush(QUEUE, *ids)
    assert look(redis, ordering) == ids


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_queue_that_changed_after_the_look_loses_and_doubles_no_job(
    redis: Redis, data: st.DataObject
) -> None:
    redis.delete(QUEUE)
    seen = [f"j{number}" for number in range(data.draw(st.integers(0, 12)))]
    num_claimed = data.draw(st.integers(0, len(seen)))
    front = [f"f{number}" for number in range(data.draw(st.integers(0, 2)))]
    back = [f"n{number}" for number in range(data.draw(st.integers(0, 2)))]
    order = data.draw(st.permutations(seen))
    kept = seen[num_claimed:]
    now = front + kept + back
    if now:
        redis.rpush(QUEUE, *now)

    arguments = {"queue": "bulk", "order": order, "most": MAX_ORDERED_JOBS}
    Scripts(redis).call_many([Call("reorder", arguments)])
    expected = [job for job in order if job in kept]
    assert queued(redis) == (front + expected + back if kept else now)


def test_jobs_behind_the_look_stay_where_they_are(redis: Redis) -> None:
    redis.rpush(QUEUE, "a", "b", "c", "d", "e")
    Scripts(redis).call_many(
        [Call("reorder", {"queue": "bulk", "order": ["c", "b", "a"], "most": 3})]
    )
    assert queued(redis) == ["c", "b", "a", "d", "e"]


def test_a_job_that_was_enqueued_twice_stays_twice(redis: Redis) -> None:
    redis.rpush(QUEUE, "a", "b", "a")
    Scripts(redis).call_many(
        [Call("reorder", {"queue": "bulk", "order": ["b", "a", "a"], "most": MAX_ORDERED_JOBS})]
    )
    assert queued(redis) == ["b", "a", "a"]


def test_a_worker_keeps_its_queues_in_order(workers: Workers) -> None:
    workers.start(queues=("prompts", "bulk"))
    for name in ("prompts", "bulk"):
        wait_until(lambda name=name: workers.redis.exists(f"tokenmill:fair-turn:{name}"))


def test_a_large_shard_is_claimed_though_small_jobs_keep_coming(
    redis: Redis, ordering: QueueOrder
) -> None:
    """A queue whose workers are just busy: each period they finish what has come."""
    redis.rpush(QUEUE, *(f"early-{number}" for number in range(50)))
    (shard,) = enqueue(redis, A, range(1), rows=100)
    for period in range(20):
        look(redis, ordering)
        if shard not in [entry.decode() for entry in redis.lpop(QUEUE, 20)]:  # type: ignore[union-attr]
            redis.rpush(QUEUE, *(f"period-{period}-{number}" for number in range(20)))
    assert shard not in queued(redis)


def test_a_large_shard_is_claimed_though_small_runs_keep_coming(
    redis: Redis, ordering: QueueOrder
) -> None:
    (shard,) = enqueue(redis, A, range(1), rows=1000)
    for period in range(40):
        enqueue(redis, f"{period:016x}", range(10), rows=100)
        look(redis, ordering)
        redis.lpop(QUEUE, 9)
    assert shard not in queued(redis)
