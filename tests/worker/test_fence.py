"""What a worker writes in Redis at a job's end, called twice or too late, and its lease until then."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue, Repeat, Retry
from rq.group import Group
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.rq_workers import leftovers
from tests.worker.redis_state import state_of
from tests.worker.stores import (
    claim,
    end_leases,
    failed,
    succeeded,
    take_up_abandoned,
    wanted,
    worker_store,
)
from worker.store.job_store import Keeping
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.outcome import Outcome


def grouped(bulk: Queue) -> None:
    members = [Queue.prepare_data("f", job_id=f"member{i}", result_ttl=0) for i in range(2)]
    Group(bulk.connection, "group").enqueue_many(bulk, members)


def test_the_record_of_a_claim_that_was_sent_twice_outlasts_the_first_sending(
    redis: Redis, bulk: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held up on its way, that one finds what was claimed and claims no more, however late it comes."""
    ids = [bulk.enqueue("f").id for _ in range(2)]
    jobs = worker_store(redis)
    call_many = jobs._call_many
    sent = [wanted(most=1, token="a" * 24)]

    def lose_the_reply(*args: Any) -> None:
        call_many(*args)
        raise RedisConnectionError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_call_many", lose_the_reply)
        with pytest.raises(RedisConnectionError):
            jobs.claim(sent, float("inf"))
    again = [replace(sent[0], most=0)]
    assert [each.job_id for each in jobs.claim(again, float("inf"))[0].jobs] == ids[:1]
    assert [each.job_id for each in claim(jobs)] == ids[1:]
    assert claim(jobs) == []
    assert 0 < redis.ttl("tokenmill:claim:" + "a" * 24) <= 600


ENDS: dict[str, tuple[Callable[[Queue], Any], Callable[[ClaimedJob], Outcome], dict[str, Any]]] = {
    "success": (lambda bulk: bulk.enqueue("f"), succeeded, {}),
    "success, not kept": (lambda bulk: bulk.enqueue("f", result_ttl=0), succeeded, {}),
    "members of a group, not kept": (grouped, succeeded, {}),
    "repeat": (lambda bulk: bulk.enqueue("f", repeat=Repeat(2)), succeeded, {}),
    "repeat, not kept": (
        lambda bulk: bulk.enqueue("f", repeat=Repeat(2), result_ttl=0),
        succeeded,
        {},
    ),
    "repeat later": (
        lambda bulk: bulk.enqueue("f", repeat=Repeat(2, interval=[600, 900])),
        succeeded,
        {},
    ),
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
    jobs = worker_store(redis, **options)
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
    late, other = worker_store(redis, **options), worker_store(redis, "other", **options)
    outcomes = [end(claimed) for claimed in claim(late)]
    end_leases(redis)
    take_up_abandoned(other, ["bulk"])
    taken = claim(other)
    assert len(taken) == len(outcomes)
    before = state_of(redis)
    assert set(late.finish(outcomes)) == {"lost"}
    assert state_of(redis) == before
    assert other.renew(taken) == []


def test_an_ended_job_whose_worker_died_before_its_dependents_were_seen_to_is_taken_over(
    redis: Redis, bulk: Queue
) -> None:
    first = bulk.enqueue("f")
    bulk.enqueue("f", depends_on=first)
    late, other = worker_store(redis), worker_store(redis, "other")
    (held,) = claim(late)
    assert set(late.finish([succeeded(held)])) == {"dependents"}
    end_leases(redis)
    (found,) = take_up_abandoned(other, ["bulk"])
    assert (found.job_id, found.has_ended) == (first.id, True)


@pytest.mark.parametrize("second_queue", ["bulk", "high"])
def test_a_job_enqueued_again_while_it_is_held_belongs_to_the_newest_execution_alone(
    redis: Redis, bulk: Queue, second_queue: str
) -> None:
    bulk.enqueue("f", "old", job_id="same")
    first, second = worker_store(redis, "first"), worker_store(redis, "second")
    old = claim(first)
    Queue(second_queue, connection=redis, serializer=JSONSerializer).enqueue(
        "f", "new", job_id="same"
    )
    new = claim(second, second_queue)
    redis.delete(f"rq:execution:same:{old[0].execution_id}")
    take_up_abandoned(second, ["bulk", "high"])
    assert claim(second, second_queue) == [], "it was queued again beside its newest execution"
    assert first.finish([succeeded(old[0], "old")]) == ["lost"]
    assert first.renew(old) == old
    assert second.renew(new) == []
    assert second.finish([succeeded(new[0], "new")]) == ["done"]
    results = Job.fetch("same", redis, JSONSerializer).results()
    assert [result.return_value for result in results] == ["new"]
    assert leftovers(redis, "bulk", "high") == []


def test_a_lease_that_is_renewed_lives_and_one_that_ran_out_puts_its_job_back_once(
    redis: Redis, bulk: Queue
) -> None:
    for _ in range(2):
        bulk.enqueue("f")
    mine, other = worker_store(redis), worker_store(redis, "other")
    renewed, silent = claim(mine)
    for key in redis.scan_iter("rq:execution:*"):
        redis.expire(key, 5)
    assert mine.renew([renewed]) == []
    assert redis.ttl(f"rq:execution:{renewed.job_id}:{renewed.execution_id}") > 5
    redis.delete(f"rq:execution:{silent.job_id}:{silent.execution_id}")
    for _ in range(2):
        redis.delete("tokenmill:maintenance:bulk")
        assert take_up_abandoned(other, ["bulk"]) == []
    assert bulk.job_ids == [silent.job_id]
