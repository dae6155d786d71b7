"""Keys of RQ's and ours that hold what no worker wrote there: they are set aside, and jobs go on."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.rq_workers import Workers, leftovers, text_of, wait_until, wait_until_started
from worker.store.job_store import JobStore
from worker.store.quarantine import Quarantine
from worker.store.records.claimed_job import Wanted

NAME = "strange"
QUARANTINE = "tokenmill:quarantine"

SHARED = [
    QUARANTINE,  # first: what was noted there is not told any more
    "rq:queues",
    "rq:workers",
    "rq:groups",
    "rq:rl-keys",
    *(f"rq:{name}:bulk" for name in ("queue", "wip", "finished", "failed", "deferred", "canceled")),
    "rq:scheduled:bulk",
    "rq:queue:bulk:intermediate",
    "rq:workers:bulk",
    "tokenmill:held:bulk",
    "tokenmill:fleet:bulk",
    f"rq:worker:{NAME}",
    f"tokenmill:worker:{NAME}",
]


@pytest.fixture
def bulk(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


def replace_by_another_type(redis: Redis, key: str) -> None:
    """Put a set where no set is expected, else a list; all at once."""
    with redis.pipeline() as pipe:
        pipe.delete(key)
        if key in ("rq:queues", "rq:workers", "rq:groups", "rq:rl-keys", "rq:workers:bulk"):
            pipe.rpush(key, "odd")
        else:
            pipe.sadd(key, "odd")
        pipe.execute()


def enqueue(queue: Queue, prompt: str) -> Job:
    """Enqueue as a producer does that tries again while its queue is of another type."""
    found: list[Job] = []

    def has_enqueued() -> bool:
        try:
            found.append(queue.enqueue("jobs.complete", prompt, max_tokens=1))
        except ResponseError:
            return False
        return True

    wait_until(has_enqueued)
    return found[0]


def claim(jobs: JobStore, most: int = 10, max_functions: int = 10) -> list[str]:
    wanted = [Wanted("bulk", most, uuid4().hex[:24], takes_suspects=True, max_functions=max_functions)]
    return [each.job_id for each in jobs.claim(wanted, float("inf"))[0].jobs]


def test_a_key_of_another_type_costs_no_job_its_result(workers: Workers, tmp_path: Path) -> None:
    """Neither one that is enqueued then, nor one that a worker holds."""
    go, queue = tmp_path / "go", workers.queue("bulk")
    process = workers.start("--name", NAME)
    held = queue.enqueue("jobs.complete", f"file:{go}", max_tokens=1)
    wait_until_started(held)
    for key in SHARED:
        replace_by_another_type(workers.redis, key)
        assert text_of(workers.result(enqueue(queue, key))) == f"echo:{key}"
    places = [f"{QUARANTINE}:{key}" for key in SHARED]
    wait_until(lambda: workers.redis.exists(*places) == len(places))
    assert all(0 < workers.redis.ttl(place) <= 7 * 24 * 3600 for place in places)
    wait_until(lambda: all(f"): {key}: a " in workers.log(process) for key in SHARED))
    go.touch()
    assert text_of(workers.result(held)) == f"echo:file:{go}"
    process.terminate()
    assert process.wait(60) == 0
    assert leftovers(workers.redis, "bulk") == []


def test_the_quarantine_is_bounded_and_its_log_is_too(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    quarantine = Quarantine(redis, "w")
    quarantine.check(["bulk"])
    redis.rpush("rq:queue:bulk", *[b"\xff%d" % number for number in range(1200)])
    jobs = JobStore(redis, "w", lease_s=30)
    while redis.exists("rq:queue:bulk"):
        assert claim(jobs) == []
    assert redis.xlen(QUARANTINE) == 1000
    quarantine.tell(logging.getLogger("test"))
    assert len(caplog.messages) == 21
    assert caplog.messages[-1] == "set aside in Redis: 980 more"
    quarantine.tell(logging.getLogger("test"))
    assert len(caplog.messages) == 21
