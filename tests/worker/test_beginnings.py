"""A job's time begins when its first sequence is scheduled or its function begins, not while it waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job, JobStatus

from tests.rq_workers import leftovers
from tests.worker.by_hand import ByHand

F = "tests.worker.functions."


@pytest.fixture
def worker(redis: Redis) -> Iterator[ByHand]:
    by_hand = ByHand(redis, slots=2)
    yield by_hand
    by_hand.close()


def statuses(jobs: list[Job]) -> set[JobStatus]:
    return {job.get_status() for job in jobs}


def test_jobs_that_wait_behind_a_batch_do_not_use_up_their_timeouts(
    redis: Redis, bulk: Queue, worker: ByHand, tmp_path: Path
) -> None:
    slow = [bulk.enqueue("jobs.complete", f"file:{tmp_path}/go", job_timeout=-1) for _ in range(2)]
    waiting = [bulk.enqueue("jobs.complete", "a", max_tokens=2, job_timeout=3) for _ in range(30)]
    worker.claim()
    worker.turn()
    for _ in range(5):
        worker.moment += 60
        worker.turn()
        worker.runner.check_deadlines()
    assert statuses(slow) == {JobStatus.STARTED}
    assert statuses(waiting) == {JobStatus.QUEUED}
    assert sorted(bulk.started_job_registry.get_job_ids()) == sorted(job.id for job in slow)
    assert worker.store.renew(worker.runner.held) == []
    for job in waiting:
        job.refresh()
        assert (job.started_at, job.worker_name, job.last_heartbeat) == (None, None, None)
    (tmp_path / "go").touch()
    worker.run_out()
    assert statuses(slow + waiting) == {JobStatus.FINISHED}
    for job in waiting:
        job.refresh()
        assert job.started_at is not None
        assert job.ended_at is not None
        assert (job.ended_at - job.started_at).total_seconds() < 60
    assert float(redis.hget("rq:worker:w", "total_working_time") or 0) == 2 * 300
    assert leftovers(redis, "bulk") == []


def test_a_timeout_counts_from_the_first_sequence_on_also_while_it_is_preempted(
    redis: Redis, bulk: Queue, worker: ByHand
) -> None:
    job = bulk.enqueue("jobs.complete", "hang", job_timeout=3)
    worker.claim()
    worker.turn()
    worker.moment += 2
    worker.runner.streams.note_started(["0.0"], worker.moment)  # scheduled once more
    worker.runner.check_deadlines()
    worker.moment += 2
    worker.runner.check_deadlines()
    worker.run_out()
    assert job.get_status() == JobStatus.FAILED
    assert "timeout value (3 seconds)" in str(job.latest_result().exc_string)  # type: ignore[union-attr]


def test_a_claimed_job_that_is_cancelled_before_it_begins_never_runs(
    redis: Redis, bulk: Queue, worker: ByHand
) -> None:
    for _ in range(2):
        bulk.enqueue("jobs.complete", "hang")
    job = bulk.enqueue("jobs.complete", "a", max_tokens=1)
    worker.claim()
    worker.turn()
    job.cancel()
    worker.runner.drop(worker.store.renew(worker.runner.held))
    worker.turn()
    assert worker.runner.num_held == 2
    assert worker.engine._engine.stats().num_waiting == 0
    assert job.get_status() == JobStatus.CANCELED
    assert [each for each in leftovers(redis, "bulk") if job.id in each] == []


def test_a_function_is_shown_as_started_before_it_runs(
    redis: Redis, bulk: Queue, worker: ByHand
) -> None:
    """Its own copy of the job and Redis tell it the same as on RQ's own worker."""
    job = bulk.enqueue(F + "own_state")
    worker.claim()
    worker.run_out()
    state = ["started", True, "w", 1]
    assert job.latest_result().return_value == [state, state]  # type: ignore[union-attr]
