"""Whose job it is follows from what only workers write, whatever anyone saves in the job's hash."""

import json
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis
from rq import Queue, Retry
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from jobs.common.keys import PROGRESS_FIELD
from tests.rq_workers import leftovers
from tests.worker.stores import claim, failed, release, succeeded, worker_store
from worker.store.job_store import JobStore
from worker.store.records.job_record import parse_call

F = "tests.worker.functions."
STATUSES = (JobStatus.QUEUED, JobStatus.FINISHED, JobStatus.CANCELED)


@pytest.fixture
def store(redis: Redis) -> JobStore:
    return worker_store(redis)


def values(job: Job) -> list[Any]:
    return [result.return_value for result in reversed(job.results())]


@pytest.mark.parametrize("status", STATUSES)
def test_a_held_job_is_held_and_ended_whatever_its_status_says(
    redis: Redis, bulk: Queue, store: JobStore, status: JobStatus
) -> None:
    jobs = [bulk.enqueue("f", retry=retry) for retry in (None, Retry(max=1))]
    held = claim(store)
    for job in jobs:
        job.set_status(status)
    assert store.renew(held) == []
    store.show_progress([(held[0], {"rows_done": 1})])
    assert json.loads(redis.hget(jobs[0].key, PROGRESS_FIELD) or b"")["rows_done"] == 1
    assert jobs[0].get_meta() == {}
    assert store.finish([succeeded(held[0]), failed(held[1])]) == ["done", "done"]
    assert bulk.finished_job_registry.get_job_ids() == [jobs[0].id]
    assert bulk.job_ids == [jobs[1].id], "its retry was lost"
    assert leftovers(redis, "bulk") == []


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("mode", ["given_back", "engine_died"])
def test_a_job_that_is_given_back_is_queued_whatever_its_status_says(
    redis: Redis, bulk: Queue, store: JobStore, status: JobStatus, mode: Any
) -> None:
    job = bulk.enqueue("f")
    held = claim(store)
    job.set_status(status)
    assert release(store, held, mode) == []
    assert bulk.job_ids == [job.id]
    assert job.get_status() == JobStatus.QUEUED
    assert leftovers(redis, "bulk") == []


@pytest.mark.parametrize("status", STATUSES)
def test_dependents_follow_the_end_and_not_what_is_saved_over_it(
    redis: Redis, bulk: Queue, store: JobStore, status: JobStatus
) -> None:
    good, bad = bulk.enqueue("f", result_ttl=77), bulk.enqueue("f")
    after_good, after_bad = (bulk.enqueue("f", depends_on=parent) for parent in (good, bad))
    held = claim(store)
    assert store.finish([succeeded(held[0]), failed(held[1])]) == ["dependents"] * 2
    for job in (good, bad):
        job.set_status(status)
    assert store.renew(held) == []
    for each in held:
        store.queue_dependents(each)
        store.close(each)
    assert bulk.job_ids == [after_good.id]
    assert bulk.deferred_job_registry.get_job_ids() == [after_bad.id]
    assert 0 < redis.ttl(good.key) <= 77, "its end was not settled"
    assert leftovers(redis, "bulk") == []


@pytest.mark.parametrize("status", STATUSES)
def test_a_cancelled_job_is_dropped_also_where_a_copy_was_saved_before(
    redis: Redis, bulk: Queue, store: JobStore, status: JobStatus
) -> None:
    jobs = [bulk.enqueue("f") for _ in range(3)]
    held = claim(store)
    for job in jobs:
        if status != JobStatus.CANCELED:  # RQ refuses to cancel what says that it is cancelled
            job.set_status(status)
        job.cancel()
    assert store.renew(held[:1]) == held[:1]
    assert store.finish([succeeded(held[1])]) == ["lost"]
    assert release(store, held[2:], "given_back") == []
    assert bulk.job_ids == []
    assert sorted(bulk.canceled_job_registry.get_job_ids()) == sorted(job.id for job in jobs)
    assert leftovers(redis, "bulk") == []


@pytest.mark.parametrize("result_ttl", [0, 500])
@pytest.mark.parametrize("queue", ["bulk", "other"])
def test_what_is_enqueued_again_runs_also_where_the_run_before_it_ends_first(
    redis: Redis, bulk: Queue, store: JobStore, queue: str, result_ttl: int
) -> None:
    """The run before is dropped: its answer is to other arguments."""
    bulk.enqueue("f", "old", job_id="same", result_ttl=result_ttl)
    (old,) = claim(store)
    again = Queue(queue, connection=redis, serializer=JSONSerializer)
    job = again.enqueue("f", "new", job_id="same", result_ttl=500)
    assert store.renew([old]) == []
    assert store.finish([succeeded(old, "old")]) == ["lost"]
    assert again.job_ids == ["same"]
    assert redis.ttl(job.key) == -1
    new = claim(store, queue)
    calls = [parse_call(each.record.payload(), 1 << 20) for each in new]
    assert [call.args for call in calls] == [["new"]]
    assert store.finish([succeeded(new[0], "new")]) == ["done"]
    assert values(job) == ["new"]
    assert leftovers(redis, "bulk", "other") == []


def test_a_second_entry_of_the_same_enqueueing_does_not_interrupt_the_run(
    redis: Redis, bulk: Queue, store: JobStore
) -> None:
    bulk.enqueue("f", "old", job_id="same")
    bulk.enqueue("f", "new", job_id="same")
    (held,) = claim(store, most=1)
    assert bulk.job_ids == ["same"]
    assert claim(store) == []
    assert bulk.job_ids == []
    assert store.finish([succeeded(held)]) == ["done"]


@pytest.mark.parametrize("result_ttl", [0, 500])
def test_a_job_that_is_scheduled_again_while_it_runs_ends_and_runs_again(
    redis: Redis, bulk: Queue, store: JobStore, result_ttl: int
) -> None:
    bulk.enqueue("f", "old", job_id="same", result_ttl=result_ttl)
    (held,) = claim(store)
    job = bulk.enqueue_in(timedelta(hours=1), "f", "new", job_id="same")
    assert store.finish([succeeded(held, "old")]) == ["done"]
    assert bulk.scheduled_job_registry.get_job_ids() == ["same"]
    assert redis.ttl(job.key) == -1, "it would be gone when its time comes"
    assert Job.fetch("same", redis, JSONSerializer).args == ["new"]


def test_a_copy_that_is_saved_changes_no_number_of_tries_left(
    redis: Redis, bulk: Queue, store: JobStore
) -> None:
    job = bulk.enqueue("f", retry=Retry(max=2))
    runs = 0
    while held := claim(store):
        runs += 1
        assert runs < 5, "it is retried for ever"
        job.save()  # the producer's copy has all of its retries left
        store.finish([failed(each) for each in held])
    assert runs == 3
