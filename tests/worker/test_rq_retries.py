"""Retries under BatchWorker: which failures use one up, which do not, and how an end is classed."""

from __future__ import annotations

from rq import Callback, Retry
from rq.job import JobStatus
from rq.registry import ScheduledJobRegistry
from rq.serializers import JSONSerializer

from tests.rq_workers import (
    Workers,
    leftovers,
)

F = "tests.worker.functions."


def test_retries_are_used_up_and_then_the_job_fails(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue(F + "boom", "no", retry=Retry(max=2))
    workers.burst()
    assert job.get_status() == JobStatus.FAILED
    assert "ValueError: no" in (workers.result(job).exc_string or "")
    job.refresh()
    assert job.retries_left == 0
    assert leftovers(workers.redis, "bulk") == []


def test_a_retry_with_an_interval_is_scheduled(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue(F + "boom", "no", retry=Retry(max=1, interval=600))
    workers.burst()
    assert job.get_status() == JobStatus.SCHEDULED
    registry = ScheduledJobRegistry("bulk", connection=workers.redis, serializer=JSONSerializer)
    assert registry.get_job_ids() == [job.id]
    assert leftovers(workers.redis, "bulk") == []


def test_a_failure_that_no_other_try_can_mend_uses_up_no_retry(workers: Workers) -> None:
    queue, retry = workers.queue("bulk"), Retry(max=2)
    jobs = [
        queue.enqueue("jobs.complete", "refuse", retry=retry),
        queue.enqueue("jobs.complete", "a", max_tokns=5, retry=retry),
        queue.enqueue("jobs.score_parquet", "no/such.parquet", "out", retry=retry),
    ]
    log = workers.burst()
    for job in jobs:
        job.refresh()
        assert (job.get_status(), job.retries_left) == (JobStatus.FAILED, 2)
        assert (workers.result(job).exc_string or "").splitlines()[-1] == "tokenmill: client"
    assert f"job {jobs[0].id} failed: RequestFailed: request 0 of this job failed: the prompt is empty" in log
    assert f"job {jobs[1].id} failed: InvalidJob: 'max_tokns' is no sampling parameter; did you mean" in log
    assert f"job {jobs[2].id} failed: InputNotFound: no input file at" in log


def test_a_failure_of_the_servers_is_tried_again_and_classed(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("jobs.complete", "hang", job_timeout=1, retry=Retry(max=1))
    log = workers.burst()
    job.refresh()
    assert (job.get_status(), job.retries_left) == (JobStatus.FAILED, 0)
    assert (workers.result(job).exc_string or "").splitlines()[-1] == "tokenmill: server"
    assert "JobTimeoutException: Task exceeded maximum timeout value (1 seconds)" in log


def test_what_a_users_function_raises_is_neither_classed_nor_logged_in_its_words(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue(F + "boom", "secret words")
    log = workers.burst()
    assert (workers.result(job).exc_string or "").splitlines()[-1] == "ValueError: secret words"
    assert f"job {job.id} failed: ValueError" in log
    assert "secret words" not in log


def test_a_returned_retry_runs_the_function_again(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue(F + "ask_for_retry", 2)
    workers.burst()
    assert workers.result(job).return_value == "done"
    job.refresh()
    assert job.number_of_retries == 2


def test_a_retried_job_keeps_its_place_and_counts_as_rq_counts(workers: Workers) -> None:
    first = workers.queue("bulk").enqueue(
        F + "boom", "x", retry=Retry(max=1, enqueue_at_front=True), on_failure=Callback(F + "on_failure")
    )
    workers.burst("--max-jobs", "1", "--name", "w")
    later = workers.queue("bulk").enqueue(F + "add", 1, 1)
    assert workers.queue("bulk").job_ids == [first.id, later.id]
    assert workers.job(first.id).retries_left == 0
    assert workers.redis.lrange("callbacks", 0, -1) == [f"failure:{first.id}:ValueError".encode()]
    workers.burst("--name", "v")
    assert first.get_status() == JobStatus.FAILED
    assert workers.redis.llen("callbacks") == 2
    assert len(first.results()) == 1


def test_repeats_are_scheduled_as_rq_does(workers: Workers) -> None:
    from rq import Repeat

    job = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1, repeat=Repeat(times=2))
    workers.burst()
    job.refresh()
    assert job.repeats_left == 0
    assert len(job.results()) == 3
