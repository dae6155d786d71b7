"""What each duty of a worker costs one Redis: the real code of the store, timed by the server's own clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from redis import Redis
from rq.serializers import JSONSerializer

from jobs.watch.queues import count_queues
from jobs.watch.samples import Point, read_samples
from ops.load.raw_jobs import enqueue_raw, job_ids
from ops.load.redis_usage import look, since
from ops.load.replay import ANSWER
from worker import BatchWorker
from worker.store.claimed_job import ClaimedJob, Wanted
from worker.store.job_store import JobStore
from worker.store.outcome import Outcome
from worker.store.quarantine import Quarantine
from worker.store.worker_record import WorkerRecord

QUEUES = ("high", "bulk")
LEASE_S = 75
SWEEP_S = 10.0
POINT = Point(at=time.time(), max_num_seqs=256, depth=dict.fromkeys(QUEUES, 0))


class IdleWorker:
    """What a worker does in Redis without anything to do, duty by duty; and with jobs, a batch at a time."""

    def __init__(self, redis: Redis, name: str) -> None:
        self.redis, self.store = redis, JobStore(redis, name, LEASE_S)
        self.quarantine = Quarantine(redis, name)
        worker: Any = BatchWorker(list(QUEUES), name=name, connection=redis, serializer=JSONSerializer)
        worker.register_birth()
        self.record = WorkerRecord(redis, name, QUEUES, worker.beat, {"worker": name, "model": "stub"})

    def prepare(self) -> None:
        """Load the scripts, and show itself."""
        self.show()
        self.look_at_keys()
        self.look_for_jobs()

    def look_for_jobs(self) -> None:
        self.store.claim([_wanted(name, 264) for name in QUEUES], 4)

    def show(self) -> None:
        self.record.count()
        self.record.show("idle", None, {"held": {}, "held_jobs": []}, POINT)

    def keep(self) -> None:
        self.record.keep(POINT)

    def look_at_keys(self) -> None:
        self.quarantine.check(QUEUES)
        self.quarantine._news()

    def sweep(self) -> None:
        self.store.reclaim_abandoned(QUEUES, SWEEP_S, 5)

    def claim(self, queue: str, most: int) -> list[ClaimedJob]:
        return self.store.claim([_wanted(queue, most)], 4)[0].jobs

    def begin(self, jobs: Sequence[ClaimedJob]) -> None:
        moment = datetime.now(UTC)
        self.store.begin([(job, moment) for job in jobs])

    def finish(self, jobs: Sequence[ClaimedJob]) -> None:
        moment, packed = datetime.now(UTC), json.dumps(ANSWER).encode()
        self.store.finish(
            [Outcome(job, "finished", None, moment, 0.1, moment, packed=packed) for job in jobs]
        )


@dataclass(frozen=True)
class Costs:
    """Microseconds of the server's main thread.

    look, show, keep, keys, sweep: of one idle worker's duty, once. call_us: of claiming a batch, beside
    its jobs; job_us: of claiming, beginning and ending a job; renew_us: of the lease of a job, once. held_us:
    of a job that is held, for whoever sweeps. sample_us: of one worker, for a page that is open.
    """

    look: float
    show: float
    keep: float
    keys: float
    sweep: float
    call_us: float
    job_us: float
    renew_us: float
    held_us: float
    sample_us: float


def measure(url: str, repeats: int = 300, jobs: int = 1024) -> Costs:
    """Carry out each duty many times."""
    with Redis.from_url(url) as redis:
        redis.flushdb()
        workers = [IdleWorker(redis, f"w{number}") for number in range(20)]
        for each in workers:
            each.prepare()

        def of_each(duty: Callable[[IdleWorker], None]) -> float:
            def all_of_them() -> None:
                for number in range(repeats):
                    duty(workers[number % len(workers)])

            return _us(redis, all_of_them) / repeats

        idle = {name: of_each(duty) for name, duty in _DUTIES.items()}
        small, _ = _batches(url, redis, workers[0], 256, 4)
        large, held = _batches(url, redis, workers[0], jobs, 128)
        renew_us = _us(redis, lambda: workers[0].store.renew(held)) / len(held)
        redis.delete(*(f"tokenmill:maintenance:{name}" for name in QUEUES))
        held_us = _us(redis, workers[0].sweep) / len(held)
        sample_us = _us(redis, lambda: _page(redis, repeats)) / repeats / len(workers)
    call_us = max(0.0, (small - large) / (1 / 4 - 1 / 128))
    return Costs(
        **idle,
        call_us=call_us,
        job_us=large - call_us / 128,
        renew_us=renew_us,
        held_us=held_us,
        sample_us=sample_us,
    )


_DUTIES: dict[str, Callable[[IdleWorker], None]] = {
    "look": IdleWorker.look_for_jobs,
    "show": IdleWorker.show,
    "keep": IdleWorker.keep,
    "keys": IdleWorker.look_at_keys,
    "sweep": IdleWorker.sweep,
}


def _batches(
    url: str, redis: Redis, worker: IdleWorker, jobs: int, batch: int
) -> tuple[float, list[ClaimedJob]]:
    """Microseconds a job, in such batches; and as many jobs again, claimed and begun."""
    prefix = uuid4().hex[:8]
    enqueue_raw(url, "high", job_ids(prefix, jobs))

    def work() -> None:
        while claimed := worker.claim("high", batch):
            worker.begin(claimed)
            worker.finish(claimed)

    spent = _us(redis, work) / jobs
    enqueue_raw(url, "bulk", job_ids(f"{prefix}h", jobs))
    held = []
    while claimed := worker.claim("bulk", batch):
        worker.begin(claimed)
        held += claimed
    return spent, held


def _page(redis: Redis, repeats: int) -> None:
    for _ in range(repeats):
        read_samples(redis)
        count_queues(redis, [name.encode() for name in QUEUES])


def _us(redis: Redis, work: Callable[[], object]) -> float:
    before = look(redis)
    work()
    return 1e6 * since(redis, before).cpu_s


def _wanted(queue: str, most: int) -> Wanted:
    return Wanted(queue, most, uuid4().hex[:24], takes_suspects=True, num_takers=8)
