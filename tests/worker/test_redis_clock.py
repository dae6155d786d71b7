"""A machine whose clock is wrong: jobs are scheduled by Redis' clock, and somebody is told."""

from datetime import timedelta

import pytest
from redis import Redis
from rq import Retry
from rq.job import JobStatus

from jobs.common.workers import Point
from tests.rq_workers import Workers, text_of, wait_until
from tests.worker.test_metrics import free_port, get
from worker.store.redis_clock import SKEW_S, RedisClock
from worker.store.worker_record import WorkerRecord

F = "tests.worker.functions."


@pytest.mark.parametrize("ahead_s", [600, -600])
def test_jobs_are_scheduled_and_retried_by_redis_clock_and_a_worker_tells_that_its_own_is_off(
    workers: Workers, ahead_s: int
) -> None:
    queue, port = workers.queue("bulk"), free_port()
    later = queue.enqueue_in(timedelta(seconds=300), "jobs.complete", "later", max_tokens=1)
    soon = queue.enqueue_in(timedelta(seconds=1), "jobs.complete", "soon", max_tokens=1)
    again = queue.enqueue(F + "boom", "no", retry=Retry(max=1, interval=1))
    worker = workers.start(
        "--with-scheduler", CLOCK_AHEAD_S=str(ahead_s), TOKENMILL_METRICS_PORT=str(port)
    )
    assert text_of(workers.result(soon)) == "echo:soon"
    wait_until(lambda: again.get_status() == JobStatus.FAILED)
    assert later.get_status() == JobStatus.SCHEDULED
    side = "ahead of" if ahead_s > 0 else "behind"
    warning = f"this machine's clock is 600 s {side} Redis': run a time service"
    assert warning in workers.log(worker)
    status, text = get(port, "/readyz")
    assert status == 200
    assert text.startswith(f"ok, but {warning}")
    assert get(port, "/livez") == (200, "ok\n")


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(SKEW_S - 1, ""), (SKEW_S + 1, "ahead of"), (-SKEW_S - 1, "behind")]
)
def test_a_clock_that_is_off_by_more_than_a_few_seconds_is_told(
    redis: Redis, ahead_s: float, words: str
) -> None:
    seconds, microseconds = redis.time()
    clock = RedisClock(lambda: seconds + microseconds / 1e6 + ahead_s)
    assert clock.warning == ""
    clock.sync(redis)
    assert clock() == pytest.approx(seconds + microseconds / 1e6, abs=0.9)
    assert words in clock.warning
    assert bool(clock.warning) == bool(words)


def test_workers_count_each_other_though_their_clocks_differ(redis: Redis) -> None:
    seconds = redis.time()[0]
    records = []
    for name, ahead_s in (("right", 0), ("ahead", 600), ("behind", -600)):
        clock = RedisClock(lambda ahead_s=ahead_s: seconds + ahead_s)  # type: ignore[misc]
        clock.sync(redis)
        records.append(WorkerRecord(redis, name, ["bulk"], lambda *_: None, {}, clock))
    for record in records:
        record.show("idle", None, {}, Point(at=0.0))
    assert [record.count()[1] for record in records] == [{"bulk": 3}] * 3
