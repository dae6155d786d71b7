"""A job's journal goes with the job: with its end, its deletion and its cancellation, and it is no other job's."""

from collections.abc import Callable

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job

from jobs.common.keys import JOURNALS_KEY, journal_key
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.items.records import Progress
from tests.worker.stores import claim, succeeded, worker_store
from worker.job_environment import JobEnvironment
from worker.store.records.claimed_job import ClaimedJob
from worker.store.registries import Registries

RECORD = (0, "what it asks", Progress(tokens={0: {0: [1, 2, 3]}}).to_json())


def written(redis: Redis, claimed: ClaimedJob) -> None:
    """Write the journal of a held job."""
    lent = JobContext(redis, "", "", "", (), ServedModel("m", "f", "d"))
    journal = JobEnvironment(lent).context(claimed, redis).journal
    assert journal is not None
    journal.write([RECORD])
    assert redis.exists(journal_key(claimed.job_id))


def read(redis: Redis, claimed: ClaimedJob, max_model_len: int = 0) -> int:
    """Return how many prompts a claim goes on with."""
    lent = JobContext(
        redis, "", "", "", (), ServedModel("m", "f", "d", max_model_len=max_model_len)
    )
    journal = JobEnvironment(lent).context(claimed, redis).journal
    assert journal is not None
    return len(journal.read())


@pytest.mark.parametrize("end", [Job.delete, Job.cancel])
def test_it_goes_once_its_worker_sees_that_the_job_is_gone(
    redis: Redis, bulk: Queue, end: Callable[[Job], object]
) -> None:
    job, store = bulk.enqueue("f"), worker_store(redis)
    (claimed,) = claim(store)
    written(redis, claimed)
    assert store.renew([claimed]) == []
    assert redis.exists(journal_key(job.id))
    end(job)
    assert store.renew([claimed]) == [claimed]
    assert not redis.exists(journal_key(job.id))


@pytest.mark.parametrize("end", [Job.delete, Job.cancel])
def test_maintenance_drops_it_where_no_worker_holds_the_job(
    redis: Redis, bulk: Queue, end: Callable[[Job], object]
) -> None:
    ended, waiting = bulk.enqueue("f"), bulk.enqueue("f")
    store = worker_store(redis)
    claims = claim(store)
    for claimed in claims:
        written(redis, claimed)
    store.release(claims, "given_back", 5)
    end(ended)
    Registries(redis).clean(["bulk"])
    assert not redis.exists(journal_key(ended.id))
    assert redis.exists(journal_key(waiting.id))
    assert redis.smembers(JOURNALS_KEY) == {waiting.id.encode()}


def test_it_goes_with_the_end_and_stays_when_the_job_is_given_back(
    redis: Redis, bulk: Queue
) -> None:
    job, store = bulk.enqueue("f"), worker_store(redis)
    (claimed,) = claim(store)
    written(redis, claimed)
    store.release([claimed], "given_back", 5)
    (again,) = claim(store)
    assert read(redis, again) == 1
    store.finish([succeeded(again)])
    assert not redis.exists(journal_key(job.id))


def test_a_job_that_was_cancelled_and_enqueued_again_keeps_its_own(
    redis: Redis, bulk: Queue
) -> None:
    job, store = bulk.enqueue("f"), worker_store(redis)
    job.cancel()
    bulk.enqueue_job(job)
    (claimed,) = claim(store)
    written(redis, claimed)
    store.release([claimed], "given_back", 5)
    (again,) = claim(store)
    assert read(redis, again) == 1


def test_another_job_of_the_same_id_and_payload_begins_anew(redis: Redis, bulk: Queue) -> None:
    store = worker_store(redis)
    bulk.enqueue("f", job_id="same")
    (claimed,) = claim(store)
    written(redis, claimed)
    left = redis.get(journal_key("same"))
    redis.delete(*redis.keys("rq:*same*"), *redis.keys("tokenmill:held:*"))
    bulk.enqueue("f", job_id="same")
    redis.set(journal_key("same"), left)  # as where nobody has seen that the job was deleted
    (again,) = claim(store)
    assert again.journal == left
    assert read(redis, again) == 0


def test_a_worker_with_another_length_begins_anew(redis: Redis, bulk: Queue) -> None:
    """`truncate_prompt_tokens` of -1 keeps as much of a prompt as the length allows."""
    store = worker_store(redis)
    bulk.enqueue("f")
    (claimed,) = claim(store)
    written(redis, claimed)
    store.release([claimed], "given_back", 5)
    (again,) = claim(store)
    assert (read(redis, again), read(redis, again, max_model_len=64)) == (1, 0)
