"""What a worker writes in Redis at a job's end, called twice, too late, or beside damaged keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue, Repeat, Retry
from rq.group import Group
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from tests.rq_workers import leftovers
from tests.worker.redis_state import state_of
from worker.store.ends import Keeping
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob, Wanted
from worker.store.records.outcome import Outcome
from worker.store.records.results import pack

END = Callable[[Queue], Job]


@pytest.fixture
def bulk(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


def store(redis: Redis, name: str = "w", **options: Any) -> JobStore:
    return JobStore(redis, name, lease_s=30, **options)


def claim(jobs: JobStore, queue: str = "bulk", most: int = 10) -> list[ClaimedJob]:
    return jobs.claim([Wanted(queue, most, uuid4().hex[:24], takes_suspects=True)], float("inf"))[0].jobs


def succeeded(claimed: ClaimedJob, value: Any = 1) -> Outcome:
    return Outcome(claimed, "finished", value, now(), 1.0, packed=pack(value, 1 << 20))


def failed(claimed: ClaimedJob) -> Outcome:
    return Outcome(claimed, "failed", "ValueError: no", now(), 1.0, retries=True)


@pytest.mark.parametrize("result_ttl", [0, 500])
def test_closing_leaves_a_job_alone_that_was_enqueued_again(
    redis: Redis, bulk: Queue, result_ttl: int
) -> None:
    """It has dependents, so its end is written first and settled when those are queued."""
    job = bulk.enqueue("f", job_id="nightly", result_ttl=result_ttl)
    bulk.enqueue("g", depends_on=job)
    jobs = store(redis)
    (held,) = claim(jobs, most=1)
    assert jobs.finish([succeeded(held)]) == ["dependents"]
    bulk.enqueue("f", job_id="nightly", result_ttl=result_ttl)
    jobs.close(held)
    assert redis.hget(job.key, "status") == b"queued"
    assert redis.ttl(job.key) == -1


def test_keys_of_another_type_do_not_hold_a_job_up_that_others_wait_for(redis: Redis, bulk: Queue) -> None:
    job, other = bulk.enqueue("f"), bulk.enqueue("f")
    dependent = bulk.enqueue("g", depends_on=other)
    jobs = store(redis)
    held = claim(jobs)
    redis.set(job.dependents_key, "y")
    redis.delete(dependent.dependencies_key)
    redis.set(dependent.dependencies_key, "y")
    for each in held:
        redis.hset(f"rq:job:{each.job_id}", "ended_as", "finished")
        jobs.dependents.queue(each)
    assert redis.hget(dependent.key, "status") == b"deferred"


def grouped(bulk: Queue) -> None:
    members = [Queue.prepare_data("f", job_id=f"member{i}", result_ttl=0) for i in range(2)]
    Group(bulk.connection, "group").enqueue_many(bulk, members)


def records(redis: Redis) -> list[str]:
    prefix = "tokenmill:claim:"
    return sorted(key.decode().removeprefix(prefix) for key in redis.scan_iter(f"{prefix}*"))


def test_the_record_of_a_claim_is_kept_until_the_next_one(redis: Redis, bulk: Queue) -> None:
    """As many as jobs come in ten minutes, they would be most of what Redis holds."""
    jobs = store(redis)
    for number in range(3):
        bulk.enqueue("f")
        (claimed,) = claim(jobs)
        assert records(redis) == [claimed.execution_id[:24]], f"after claim {number}"
    assert claim(jobs) == []
    assert records(redis) == []


def test_the_record_of_a_claim_that_was_sent_twice_outlasts_the_first_sending(
    redis: Redis, bulk: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held up on its way, that one finds what was claimed and claims no more, however late it comes."""
    ids = [bulk.enqueue("f").id for _ in range(2)]
    jobs = store(redis)
    call_many = jobs._call_many
    wanted = [Wanted("bulk", 1, "a" * 24, takes_suspects=True)]

    def lose_the_reply(*args: Any) -> None:
        call_many(*args)
        raise RedisConnectionError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_call_many", lose_the_reply)
        with pytest.raises(RedisConnectionError):
            jobs.claim(wanted, float("inf"))
    again = [replace(wanted[0], most=0)]
    assert [each.job_id for each in jobs.claim(again, float("inf"))[0].jobs] == ids[:1]
    assert [each.job_id for each in claim(jobs)] == ids[1:]
    assert claim(jobs) == []
    assert records(redis) == ["a" * 24]
    assert 0 < redis.ttl("tokenmill:claim:" + "a" * 24) <= 600


ENDS: dict[str, tuple[Callable[[Queue], Any], Callable[[ClaimedJob], Outcome], dict[str, Any]]] = {
    "success": (lambda bulk: bulk.enqueue("f"), succeeded, {}),
    "success, not kept": (lambda bulk: bulk.enqueue("f", result_ttl=0), succeeded, {}),
    "members of a group, not kept": (grouped, succeeded, {}),
    "repeat": (lambda bulk: bulk.enqueue("f", repeat=Repeat(2)), succeeded, {}),
    "repeat, not kept": (lambda bulk: bulk.enqueue("f", repeat=Repeat(2), result_ttl=0), succeeded, {}),
    "repeat later": (lambda bulk: bulk.enqueue("f", repeat=Repeat(2, interval=[600, 900])), succeeded, {}),
    "failure": (lambda bulk: bulk.enqueue("f"), failed, {}),
    "failure, not kept": (lambda bulk: bulk.enqueue("f", failure_ttl=0), failed, {}),
    "failure, not recorded": (lambda bulk: bulk.enqueue("f"), failed, {"keeping": Keeping(False)}),
    "retry": (lambda bulk: bulk.enqueue("f", retry=Retry(2)), failed, {}),
    "retry later": (lambda bulk: bulk.enqueue("f", retry=Retry(2, interval=600)), failed, {}),
    "returned retry": (lambda bulk: bulk.enqueue("f"), lambda held: succeeded(held, Retry(3)), {}),
}


@pytest.mark.parametrize("kind", ENDS)
def test_an_end_whose_reply_was_lost_is_written_once_and_recognised(
    redis: Redis, bulk: Queue, kind: str
) -> None:
    enqueue, end, options = ENDS[kind]
    enqueue(bulk)
    jobs = store(redis, **options)
    outcomes = [end(claimed) for claimed in claim(jobs)]
    assert set(jobs.finish(outcomes)) == {"done"}
    written = state_of(redis), redis.hgetall("rq:worker:w")
    assert set(jobs.finish(outcomes)) == {"again"}
    assert (state_of(redis), redis.hgetall("rq:worker:w")) == written
    assert leftovers(redis, "bulk", "high") == []
    assert redis.scard("rq:group:group") == 0


@pytest.mark.parametrize("kind", ENDS)
def test_an_end_that_comes_after_the_job_was_given_to_another_worker_writes_nothing(
    redis: Redis, bulk: Queue, kind: str
) -> None:
    enqueue, end, options = ENDS[kind]
    enqueue(bulk)
    late, other = store(redis, **options), store(redis, "other", **options)
    outcomes = [end(claimed) for claimed in claim(late)]
    redis.delete(*redis.scan_iter("rq:execution:*"))  # the leases ran out
    other.reclaim_abandoned(["bulk"], 1.0, max_deaths=5)
    taken = claim(other)
    assert len(taken) == len(outcomes)
    before = state_of(redis)
    assert set(late.finish(outcomes)) == {"lost"}
    assert state_of(redis) == before
    assert other.renew(taken) == []


def test_a_ttl_bounds_the_time_in_the_queue_and_not_the_run(redis: Redis, bulk: Queue) -> None:
    job = bulk.enqueue("f", ttl=60)
    jobs = store(redis)
    held = claim(jobs)
    assert redis.ttl(job.key) == -1
    jobs.release(held, "given_back", 5)
    assert 0 < redis.ttl(job.key) <= 60


def test_a_repeat_runs_as_often_as_asked_whatever_is_sent_twice(redis: Redis, bulk: Queue) -> None:
    job = bulk.enqueue("f", repeat=Repeat(2))
    jobs, runs = store(redis), 0
    while held := claim(jobs):
        runs += 1
        jobs.finish([succeeded(held[0])])
        jobs.finish([succeeded(held[0])])
    assert runs == 3
    assert len(job.results()) == 3
    assert job.get_status() == JobStatus.FINISHED


def test_a_repeat_with_dependents_queues_them_and_then_itself(redis: Redis, bulk: Queue) -> None:
    job = bulk.enqueue("f", repeat=Repeat(1))
    dependent = bulk.enqueue("f", depends_on=job)
    jobs = store(redis)
    held = claim(jobs)[0]
    for _ in range(2):  # killed after the first, another worker does the same
        assert jobs.finish([succeeded(held)]) == ["dependents"]
        jobs.dependents.queue(held)
    jobs.close(held)
    jobs.close(held)
    assert bulk.job_ids == [dependent.id, job.id]
    assert Job.fetch(job.id, redis, JSONSerializer).repeats_left == 0


def test_a_dependent_of_two_jobs_that_end_together_is_queued_once(redis: Redis, bulk: Queue) -> None:
    first, second = bulk.enqueue("f"), bulk.enqueue("f")
    dependent = bulk.enqueue("f", depends_on=[first, second])
    jobs = store(redis)
    held = claim(jobs)
    assert jobs.finish([succeeded(each) for each in held]) == ["dependents"] * 2
    for each in held:
        jobs.dependents.queue(each)
        jobs.close(each)
        if each is held[0]:
            assert [claimed.job_id for claimed in claim(jobs)] == [dependent.id]
    assert bulk.job_ids == []


def test_an_unreadable_dependent_is_queued_to_fail_and_holds_up_no_other(redis: Redis, bulk: Queue) -> None:
    first = bulk.enqueue("f")
    bad, odd, good = (bulk.enqueue("f", depends_on=first) for _ in range(3))
    redis.hset(bad.key, "created_at", "yesterday")
    redis.delete(odd.key)
    redis.set(odd.key, "no hash")
    jobs = store(redis)
    held = claim(jobs)[0]
    assert jobs.finish([succeeded(held)]) == ["dependents"]
    jobs.dependents.queue(held)
    assert sorted(bulk.job_ids) == sorted([bad.id, good.id])


@pytest.mark.parametrize("second_queue", ["bulk", "high"])
def test_a_job_enqueued_again_while_it_is_held_belongs_to_the_newest_execution_alone(
    redis: Redis, bulk: Queue, second_queue: str
) -> None:
    bulk.enqueue("f", "old", job_id="same")
    first, second = store(redis, "first"), store(redis, "second")
    old = claim(first)
    Queue(second_queue, connection=redis, serializer=JSONSerializer).enqueue("f", "new", job_id="same")
    new = claim(second, second_queue)
    redis.delete(f"rq:execution:same:{old[0].execution_id}")
    second.reclaim_abandoned(["bulk", "high"], 1.0, max_deaths=5)
    assert claim(second, second_queue) == [], "it was queued again beside its newest execution"
    assert first.finish([succeeded(old[0], "old")]) == ["lost"]
    assert first.renew(old) == old
    assert second.renew(new) == []
    assert second.finish([succeeded(new[0], "new")]) == ["done"]
    results = Job.fetch("same", redis, JSONSerializer).results()
    assert [result.return_value for result in results] == ["new"]
    assert leftovers(redis, "bulk", "high") == []


@pytest.mark.parametrize("damaged", ["rq:job:{}", "rq:executions:{}"])
def test_a_job_whose_keys_are_of_another_type_costs_no_other_its_lease(
    redis: Redis, bulk: Queue, damaged: str
) -> None:
    ids = [bulk.enqueue("f").id for _ in range(3)]
    jobs = store(redis)
    held = claim(jobs)
    assert jobs.begin([(claimed, now()) for claimed in held]) == []
    redis.delete(damaged.format(ids[1]))
    redis.set(damaged.format(ids[1]), "no hash")
    for key in redis.scan_iter("rq:execution:*"):
        redis.expire(key, 5)
    jobs.show_progress([(claimed, {"rows_done": 1}) for claimed in held])
    assert Job.fetch(ids[2], redis, JSONSerializer).meta == {"rows_done": 1}
    assert jobs.renew(held) == [held[1]]
    for claimed in (held[0], held[2]):
        assert redis.ttl(f"rq:execution:{claimed.job_id}:{claimed.execution_id}") > 5
    assert redis.zcard("rq:wip:bulk") == 2


def test_a_queued_id_whose_keys_are_of_another_type_holds_up_no_claim(redis: Redis, bulk: Queue) -> None:
    ids = [bulk.enqueue("f").id for _ in range(3)]
    redis.delete(f"rq:job:{ids[0]}")
    redis.set(f"rq:job:{ids[0]}", "no hash")
    redis.set(f"rq:executions:{ids[1]}", "no list of executions")
    assert [claimed.job_id for claimed in claim(store(redis))] == ids[1:]


def test_an_abandoned_job_whose_keys_are_of_another_type_holds_up_no_sweep(redis: Redis, bulk: Queue) -> None:
    ids = [bulk.enqueue("f").id for _ in range(3)]
    jobs = store(redis)
    claim(jobs)
    redis.delete(f"rq:job:{ids[1]}", *redis.scan_iter("rq:execution:*"))
    redis.set(f"rq:job:{ids[1]}", "no hash")
    jobs.reclaim_abandoned(["bulk"], 1.0, max_deaths=5)
    assert sorted(bulk.job_ids) == sorted([ids[0], ids[2]])
    assert redis.zcard("rq:wip:bulk") == 0
