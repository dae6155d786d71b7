"""Jobs behind a rate limit run one after the other, and none waits for ever, whatever becomes of a worker."""

import os
import signal
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from rq import Queue, RateLimit
from rq.job import Job, JobStatus

from tests.rq_workers import Workers, stats_of, wait_until, wait_until_started

F = "tests.worker.functions."


LIMIT = RateLimit("key", 1)
_numbers = count()


def enqueue_rate_limited(queue: Queue, function: str, *args: Any, **options: Any) -> Job:
    """In order of their ids, which RQ goes by among jobs of the same second."""
    job_id = f"limited-{next(_numbers):06}"
    return queue.enqueue(
        F + function, args=args, job_id=job_id, job_timeout=60, rate_limit=LIMIT, **options
    )


def test_no_more_jobs_of_a_limit_run_than_it_allows(workers: Workers) -> None:
    queue = workers.queue("bulk")
    jobs = [enqueue_rate_limited(queue, "meet", "gate") for _ in range(3)]
    workers.start()
    for number, job in enumerate(jobs):
        assert workers.wait_for("gate:waiting") == job.id
        assert workers.redis.llen("gate:waiting") == 0
        workers.redis.rpush("gate", f"go{number}")
        assert workers.result(job).return_value == f"go{number}"


def test_the_slot_of_a_running_job_that_is_cancelled_goes_to_the_next(workers: Workers) -> None:
    queue = workers.queue("bulk")
    running, waiting = (
        enqueue_rate_limited(queue, "linger"),
        enqueue_rate_limited(queue, "add", 1, 2),
    )
    workers.start(PERIODS_S="1")
    wait_until_started(running)
    running.cancel()
    assert workers.result(waiting).return_value == 3


def test_a_killed_workers_job_keeps_its_slot_until_another_worker_ends_it(workers: Workers) -> None:
    queue = workers.queue("bulk")
    killed, following = (enqueue_rate_limited(queue, "meet", "gate") for _ in range(2))
    worker = workers.start()
    assert workers.wait_for("gate:waiting") == killed.id
    worker.kill()
    worker.wait()
    workers.start()
    assert workers.wait_for("gate:waiting") == killed.id
    assert workers.redis.zrange("rq:rl:key:allowed", 0, -1) == [killed.id.encode()]
    workers.redis.rpush("gate", "go", "go")
    assert [workers.result(job).return_value for job in (killed, following)] == ["go"] * 2
    wait_until(lambda: workers.redis.zcard("rq:rl:key:allowed") == 0)


def test_a_worker_that_thaws_gives_no_slot_back_a_second_time(
    workers: Workers, tmp_path: Path
) -> None:
    queue = workers.queue("bulk")
    first = queue.enqueue("jobs.complete", f"file:{tmp_path}/go", rate_limit=LIMIT)
    frozen = workers.start("--name", "frozen")
    wait_until_started(first)
    os.kill(frozen.pid, signal.SIGSTOP)
    running, waiting = (enqueue_rate_limited(queue, "meet", "gate") for _ in range(2))
    (tmp_path / "go").touch()
    workers.start("--name", "other")
    assert workers.wait_for("gate:waiting") == running.id
    os.kill(frozen.pid, signal.SIGCONT)
    wait_until(lambda: stats_of(workers, "frozen").get("jobs_held") == 0)
    assert workers.redis.zrange("rq:rl:key:allowed", 0, -1) == [running.id.encode()]
    assert waiting.get_status() == JobStatus.RATE_LIMITED
    workers.redis.rpush("gate", "go", "go")
    assert workers.result(waiting).return_value == "go"
    assert len(first.results()) == 1


def test_a_job_that_its_killed_queuer_left_ready_is_queued(workers: Workers) -> None:
    queue = workers.queue("bulk")
    parent = queue.enqueue(F + "add", 1, 1)
    child = queue.enqueue(F + "add", 1, 2, depends_on=parent)
    stale = queue.enqueue(F + "add", 1, 3)
    with workers.redis.pipeline() as pipe:
        queue.ready_job_registry.register_jobs(
            [child], pipe
        )  # RQ's worker does, and then queues them
        queue.ready_job_registry.add(stale, pipeline=pipe)
        pipe.execute()
    queue.remove(parent)
    workers.start()
    assert workers.result(child).return_value == 3
    assert workers.result(stale).return_value == 4
    wait_until(lambda: queue.ready_job_registry.count == 0)
    assert [len(job.results()) for job in (child, stale)] == [1, 1]


def test_jobs_whose_time_comes_at_once_wait_for_their_slots(workers: Workers) -> None:
    for _ in range(2):
        workers.queue("bulk").enqueue_in(timedelta(0), F + "meet", "gate", rate_limit=LIMIT)
    workers.start("--with-scheduler")
    for _ in range(2):
        workers.wait_for("gate:waiting")
        assert workers.redis.zcard("rq:rl:key:allowed") == 1
        assert workers.redis.llen("gate:waiting") == 0
        workers.redis.rpush("gate", "go")
    wait_until(lambda: workers.redis.zcard("rq:rl:key:allowed") == 0)
