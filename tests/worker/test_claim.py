"""Which jobs of a queue a claim takes, and which it leaves where they are."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from jobs.common.keys import FUNCTION, KIND_FIELD, MODEL_FIELD
from tests.rq_workers import Workers
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import Claim, Wanted

PROMPT = "jobs.complete"


@pytest.fixture
def bulk(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


def claim(redis: Redis, *, model: str = "ours", token: str | None = None, **options: Any) -> Claim:
    wanted = Wanted(
        "bulk", options.pop("most", 10), token or uuid4().hex[:24], takes_suspects=True, **options
    )
    return JobStore(redis, "w", lease_s=30, models=(model,)).claim([wanted], float("inf"))[0]


def ids(claimed: Claim) -> list[str]:
    return [each.job_id for each in claimed.jobs]


def enqueue(bulk: Queue, job_id: str, model: str | None = None, kind: str | None = None) -> None:
    bulk.enqueue("f", job_id=job_id)
    for name, value in ((MODEL_FIELD, model), (KIND_FIELD, kind)):
        if value is not None:
            bulk.connection.hset(f"rq:job:{job_id}", name, value)


def test_jobs_of_another_model_stay_in_the_queue_in_their_order(redis: Redis, bulk: Queue) -> None:
    for job_id, model in (("a", "other"), ("b", None), ("c", "other"), ("d", "ours"), ("e", "other")):
        enqueue(bulk, job_id, model)
    taken = claim(redis)
    assert (ids(taken), taken.num_foreign) == (["b", "d"], 3)
    assert bulk.job_ids == ["a", "c", "e"]
    assert ids(claim(redis, model="other")) == ["a", "c", "e"]


def test_a_worker_without_a_model_takes_only_what_any_may_run(redis: Redis, bulk: Queue) -> None:
    enqueue(bulk, "a", "other")
    enqueue(bulk, "b")
    assert ids(claim(redis, model="")) == ["b"]


def test_known_functions_stay_while_their_places_are_taken(redis: Redis, bulk: Queue) -> None:
    for job_id, kind in (("a", FUNCTION), ("b", None), ("c", FUNCTION)):
        enqueue(bulk, job_id, kind=kind)
    taken = claim(redis, max_functions=0)
    assert (ids(taken), taken.num_foreign) == (["b"], 0)
    assert bulk.job_ids == ["a", "c"]
    assert ids(claim(redis)) == ["a", "c"]


def test_known_files_stay_while_their_places_are_taken_and_functions_do_not_count_as_such(
    redis: Redis, bulk: Queue
) -> None:
    for number, kind in enumerate(["file", "function", "file", "file", None]):
        enqueue(bulk, f"j{number}", kind=kind)
    assert ids(claim(redis, max_files=1, max_functions=1)) == ["j0", "j1", "j4"]
    assert bulk.job_ids == ["j2", "j3"]
    assert ids(claim(redis, max_files=0)) == []
    assert ids(claim(redis, max_files=5, max_functions=0)) == ["j2", "j3"]


def test_a_claim_sent_again_takes_no_more_and_leaves_the_order(redis: Redis, bulk: Queue) -> None:
    for job_id, model in (("a", "other"), ("b", None), ("c", "other"), ("d", None)):
        enqueue(bulk, job_id, model)
    token = "a" * 24
    first = claim(redis, token=token, most=1)
    again = claim(redis, token=token, most=1)
    assert ids(first) == ids(again) == ["b"]
    assert [each.execution_id for each in first.jobs] == [each.execution_id for each in again.jobs]
    assert bulk.job_ids == ["a", "c", "d"]


def test_what_an_earlier_claim_took_is_told_while_suspended_and_no_other_job_is_taken(
    redis: Redis, bulk: Queue
) -> None:
    """So nothing is claimed once `rq suspend` has returned, however slow the worker is that was about to."""
    enqueue(bulk, "a")
    earlier = claim(redis, token="a" * 24)
    suspend(redis)
    enqueue(bulk, "b")
    again = claim(redis, token="a" * 24)
    assert (ids(again), again.is_suspended) == (ids(earlier), False)
    held_up = claim(redis)
    assert (ids(held_up), held_up.is_suspended, bulk.job_ids) == ([], True, ["b"])
    resume(redis)
    assert ids(claim(redis)) == ["b"]


def test_a_queue_of_jobs_that_stay_is_only_read(redis: Redis, bulk: Queue) -> None:
    for number in range(250):
        enqueue(bulk, str(number), "other")
    before = redis.info("commandstats")
    taken = claim(redis)
    after = redis.info("commandstats")
    assert (ids(taken), taken.num_foreign) == ([], 250)
    for name in ("cmdstat_lpop", "cmdstat_lpush", "cmdstat_rpush"):
        assert after.get(name) == before.get(name)


def test_a_claim_looks_behind_a_thousand_jobs_that_stay_and_no_further(redis: Redis, bulk: Queue) -> None:
    for number in range(1005):
        enqueue(bulk, f"n{number}", "other" if number != 999 else None)
    enqueue(bulk, "last")
    assert ids(claim(redis, most=1)) == ["n999"]
    taken = claim(redis, most=1)
    assert (ids(taken), taken.num_foreign) == ([], 1005), "all of the queue counts as out of reach"
    assert bulk.job_ids[-1] == "last"


def test_a_claim_looks_for_prompts_behind_two_hundred_files_and_no_further(redis: Redis, bulk: Queue) -> None:
    """Each look costs the server time."""
    for number in range(205):
        enqueue(bulk, f"n{number}", kind="file" if number != 100 else None)
    enqueue(bulk, "last")
    assert ids(claim(redis, max_files=0)) == ["n100"]
    assert ids(claim(redis, max_files=0)) == []
    assert len(ids(claim(redis, max_files=6, most=6))) == 6
    assert ids(claim(redis, max_files=0)) == ["last"]


def test_a_burst_worker_leaves_what_only_another_model_may_run(workers: Workers) -> None:
    bulk = workers.queue("bulk")
    foreign, ours = (bulk.enqueue(PROMPT, text) for text in ("theirs", "ours"))
    workers.redis.hset(foreign.key, MODEL_FIELD, "of another model")
    workers.burst()
    assert ours.is_finished
    assert bulk.job_ids == [foreign.id]


@pytest.mark.parametrize("deaths", ["5", "many"])
def test_deaths_that_a_producer_writes_into_its_jobs_are_nobodys_word(
    redis: Redis, bulk: Queue, deaths: str
) -> None:
    for job_id in "ab":
        enqueue(bulk, job_id)
        redis.hset(f"rq:job:{job_id}", "worker_deaths", deaths)
    wanted = Wanted("bulk", 10, "0" * 24, takes_suspects=True)
    [taken] = JobStore(redis, "w", lease_s=30).claim([wanted], suspect_deaths=4)
    assert [(each.job_id, each.deaths) for each in taken.jobs] == [("a", 0), ("b", 0)]


def test_a_job_that_took_workers_with_it_is_claimed_by_itself(redis: Redis, bulk: Queue) -> None:
    for job_id in "abc":
        enqueue(bulk, job_id)
    redis.set("tokenmill:deaths:a", 4)
    wanted = Wanted("bulk", 10, "0" * 24, takes_suspects=True)
    [taken] = JobStore(redis, "w", lease_s=30).claim([wanted], suspect_deaths=4)
    assert [(each.job_id, each.deaths) for each in taken.jobs] == [("a", 4)]
