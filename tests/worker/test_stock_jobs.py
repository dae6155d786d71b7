"""What RQ's own workers leave behind when they are killed is taken up as they would take it up."""

import time
from typing import Any

from redis import Redis
from rq import Callback, Queue, Retry
from rq.job import Dependency, JobStatus

from tests.rq_workers import Workers, leftovers, wait_until_started

F = "tests.worker.functions."
STOCK = "rq.worker.SimpleWorker"


def kill_stock_workers(workers: Workers, jobs: int) -> None:
    """Let one of RQ's own workers die with each job of the queue, and its time pass."""
    for _ in range(jobs):
        assert workers.start("--burst", queues=("bulk",), worker_class=STOCK).wait(timeout=60) == -9
    let_time_pass(workers.redis)


def let_time_pass(redis: Redis) -> None:
    """Move what RQ's worker promised at the last sign of its life into the past."""
    for member in redis.zrange("rq:wip:bulk", 0, -1):
        redis.zadd("rq:wip:bulk", {member: time.time() - 1})
        redis.delete(f"rq:execution:{member.decode()}")
    for key in redis.scan_iter("rq:queue:bulk:intermediate:first_seen:*"):
        redis.set(key, time.time() - 61)


def enqueue_deadly_jobs(queue: Queue) -> int:
    """Jobs of every kind that a worker may die with; returns how many."""
    failure = {"on_failure": Callback(F + "on_failure")}
    fails = queue.enqueue(F + "die_at_first", "fails", job_id="fails", **failure)
    queue.enqueue(F + "die_at_first", "retries", job_id="retries", retry=Retry(max=2), **failure)
    queue.enqueue(F + "die_at_first", "later", job_id="later", retry=Retry(max=1, interval=600))
    queue.enqueue(
        F + "add", 1, 1, job_id="after-failure", depends_on=Dependency([fails], allow_failure=True)
    )
    queue.enqueue(F + "add", 1, 1, job_id="never", depends_on=[fails])
    return 3


def what_became_of_them(workers: Workers, **options: Any) -> dict[str, Any]:
    workers.redis.flushall()
    queue = workers.queue("bulk")
    kill_stock_workers(workers, enqueue_deadly_jobs(queue))
    workers.burst("--exception-handler", F + "note_exception", queues=("bulk",), **options)
    jobs = [
        workers.job(job_id) for job_id in ("fails", "retries", "later", "after-failure", "never")
    ]
    return {
        "jobs": {job.id: (job.get_status(), job.retries_left) for job in jobs},
        "failed": queue.failed_job_registry.get_job_ids(),
        "finished": sorted(queue.finished_job_registry.get_job_ids()),
        "scheduled": queue.scheduled_job_registry.get_job_ids(),
        "deferred": queue.deferred_job_registry.get_job_ids(),
        "queued": queue.job_ids,
        "called": sorted(workers.redis.lrange("callbacks", 0, -1)),
    }


def test_started_jobs_of_a_killed_stock_worker_end_as_with_rqs_own_maintenance(
    workers: Workers,
) -> None:
    ours = what_became_of_them(workers)
    assert leftovers(workers.redis, "bulk") == []
    text = str(workers.result(workers.job("fails")).exc_string)
    assert "AbandonedJobError: the worker that ran it is gone" in text
    assert ours["jobs"]["retries"] == ("finished", 1)
    assert ours == what_became_of_them(workers, worker_class=STOCK)


def test_a_job_stuck_in_the_intermediate_queue_fails_or_is_retried(workers: Workers) -> None:
    queue = workers.queue("bulk")
    fails = queue.enqueue(F + "add", 1, 1)
    retries = queue.enqueue(F + "add", 1, 2, retry=Retry(max=1))
    gone = queue.enqueue(F + "add", 1, 1)
    for _ in range(3):  # as a worker does before it is killed
        workers.redis.lmove("rq:queue:bulk", "rq:queue:bulk:intermediate", "LEFT", "RIGHT")
    workers.redis.delete(gone.key)
    workers.burst(queues=("bulk",))
    assert [job.get_status() for job in (fails, retries)] == [JobStatus.QUEUED] * 2, (
        "taken before its minute"
    )
    let_time_pass(workers.redis)
    workers.redis.delete("tokenmill:maintenance-stock:bulk")
    workers.burst(queues=("bulk",))
    assert "stuck in the intermediate queue" in str(workers.result(fails).exc_string)
    assert workers.result(retries).return_value == 3
    assert workers.redis.keys("rq:queue:bulk:intermediate*") == []


def test_a_stock_worker_that_lives_keeps_its_job_beside_ours(workers: Workers) -> None:
    queue = workers.queue("bulk")
    job = queue.enqueue(F + "meet", "gate")
    stock = workers.start(queues=("bulk",), worker_class="rq.worker.Worker")
    wait_until_started(job)
    workers.burst(queues=("bulk",))
    assert job.get_status() == JobStatus.STARTED
    workers.redis.rpush("gate", "go")
    assert workers.result(job).return_value == "go"
    stock.terminate()
    assert stock.wait(timeout=60) == 0
    assert len(job.results()) == 1


def test_a_stale_copy_that_was_saved_hides_no_abandoned_job(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue(F + "die_at_first", "key")
    kill_stock_workers(workers, 1)
    job.set_status(JobStatus.FINISHED)
    workers.burst(queues=("bulk",))
    assert job.get_status() == JobStatus.FAILED
