"""A worker whose Redis goes away and comes back: what it promised still holds."""

import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from tests.faults.servers import DurableRedis
from tests.forking import ForkedWorkers
from tests.rq_workers import (
    Workers,
    leftovers,
    signal_until_it_ends,
    text_of,
    wait_until,
    wait_until_started,
)

pytestmark = pytest.mark.long


@pytest.fixture
def server() -> Iterator[DurableRedis]:
    with TemporaryDirectory(prefix="f") as folder:
        running = DurableRedis(Path(folder))
        yield running
        running.close()


@pytest.fixture
def workers(server: DurableRedis, tmp_path: Path) -> Iterator[Workers]:
    running = ForkedWorkers(server.url, tmp_path)
    yield running
    running.close()
    running.redis.close()


def test_a_second_signal_ends_a_worker_that_cannot_reach_redis(
    workers: Workers, server: DurableRedis, tmp_path: Path
) -> None:
    gate = f"file:{tmp_path}/go"
    job = workers.queue("bulk").enqueue("jobs.complete", gate, max_tokens=1)
    process = workers.start()
    wait_until_started(job)
    server.kill()
    signal_until_it_ends(process, signal.SIGINT)
    assert "other workers take it up" in workers.log(process)
    server.restart()
    (tmp_path / "go").touch()
    workers.start()
    assert text_of(workers.result(job)) == f"echo:{gate}"
    wait_until(lambda: not leftovers(workers.redis, "bulk"))


def test_commands_are_heard_again_after_redis_was_restarted(
    workers: Workers, server: DurableRedis
) -> None:
    job = workers.queue("bulk").enqueue("jobs.complete", "hang")
    workers.start("--name", "w")
    wait_until_started(job)
    server.kill()
    server.restart()
    wait_until(lambda: workers.redis.pubsub_numsub("rq:pubsub:w")[0][1] == 1)
    send_stop_job_command(workers.redis, job.id, serializer=JSONSerializer)
    assert "stopped by user" in str(workers.result(job).exc_string)


def test_a_worker_that_was_struck_off_registers_again(workers: Workers) -> None:
    """After an outage longer than the time to live of its hash, any other worker strikes it off."""
    workers.start("--name", "w")
    wait_until(lambda: workers.redis.exists("tokenmill:worker:w"))
    workers.redis.delete("rq:worker:w", "rq:workers", "rq:workers:bulk")
    wait_until(lambda: workers.redis.sismember("rq:workers:bulk", "rq:worker:w"))
    assert "worker w" in workers.rq("info", "--raw", "--worker-class", "worker.BatchWorker")


def test_the_scheduler_outlives_a_restart_of_redis(workers: Workers, server: DurableRedis) -> None:
    process = workers.start("--name", "w", "--with-scheduler")
    wait_until(
        lambda: workers.redis.keys("rq:scheduler:*") and workers.redis.exists("tokenmill:worker:w")
    )
    server.kill()
    wait_until(lambda: "the scheduler failed" in workers.log(process))
    server.restart()
    job = workers.queue("bulk").enqueue_in(timedelta(seconds=1), "jobs.complete", "a", max_tokens=1)
    assert text_of(workers.result(job)) == "echo:a"
