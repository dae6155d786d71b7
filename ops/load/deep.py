"""A queue of millions of jobs: what one takes of Redis' memory, and that nothing goes through all of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

from redis import Redis

from jobs.watch.failed_jobs import newest_failed
from jobs.watch.queues import count_queues
from jobs.watch.runs import list_runs
from jobs.watch.samples import read_samples
from ops.load.raw_jobs import CHUNK, enqueue_raw, job_ids
from ops.load.redis_usage import look, memory_bytes, since
from ops.load.report import Report
from ops.load.site import MIB, site
from worker.store.claimed_job import Wanted
from worker.store.job_store import JobStore

QUEUE = "bulk"
MAX_BYTES = 2048
"""Of Redis for each queued job: RQ's hash of it, its id in the queue, and nothing of ours."""

STEP = 100_000
TRIES = 20

MAX_GROWTH = 3.0
"""How much longer a claim or a look may take than with a thousand jobs, on a machine that others use too."""


def deep(jobs: int = 1_000_000, seconds: float = 10.0, most_mib: int = 8192) -> Report:
    """Fill a queue, up to `most_mib` of Redis at most, look at it, and let a worker serve it."""
    report = Report(f"deep: {jobs:,} queued prompts")
    with site() as place:
        redis = place.redis
        enqueue_raw(place.url, QUEUE, job_ids("first", CHUNK))
        shallow = _costs(redis)
        empty, began, queued = memory_bytes(redis), time.monotonic(), 0
        while queued < jobs and memory_bytes(redis) < most_mib * MIB:
            enqueue_raw(place.url, QUEUE, job_ids("deep", STEP, queued))
            queued += STEP
        report.equal("jobs that were queued", queued, max(STEP, jobs // STEP * STEP), measured=True)
        report.tell("enqueued per second by one client", queued / (time.monotonic() - began))
        report.at_most("Redis bytes a job", (memory_bytes(redis) - empty) / queued, MAX_BYTES)
        for what, (before, after) in {k: (shallow[k], v) for k, v in _costs(redis).items()}.items():
            report.tell(f"{what}, µs of Redis, with {CHUNK:,} jobs", before)
            report.tell(f"{what}, µs of Redis, with {redis.llen(f'rq:queue:{QUEUE}'):,}", after)
            report.at_most(f"{what}, growth", after / max(before, 1.0), MAX_GROWTH, measured=True)
        place.start("w", settings={"TOKENMILL_MAX_NUM_SEQS": "256", "TOKENMILL_LEASE_S": "60"})
        place.wait(lambda: redis.zcard(f"rq:finished:{QUEUE}") > 0)
        usage, done = look(redis), redis.zcard(f"rq:finished:{QUEUE}")
        over = time.monotonic() + seconds
        place.wait(lambda: time.monotonic() > over)
        spent, done = since(redis, usage), redis.zcard(f"rq:finished:{QUEUE}") - done
        report.tell("jobs/s of one worker", done / spent.seconds)
        report.tell("Redis µs a job", 1e6 * spent.cpu_s / max(1, done))
    return report


def _costs(redis: Redis) -> dict[str, float]:
    """Microseconds of Redis for one of each."""
    store = JobStore(redis, "looker", lease_s=60)
    ways: dict[str, Callable[[], object]] = {
        "a claim of 64 jobs, given back": lambda: _claim(store),
        "`tokenmill info`": lambda: (count_queues(redis, [QUEUE.encode()]), read_samples(redis)),
        "`tokenmill status`": lambda: list_runs(redis),
        "failed jobs of the page": lambda: newest_failed(redis, [QUEUE.encode()], 20),
    }
    _claim(store)  # loads the scripts
    return {what: _us(redis, way) for what, way in ways.items()}


def _claim(store: JobStore) -> None:
    """Claim, and give back: in the end all stands where it stood."""
    wanted = Wanted(QUEUE, 64, uuid4().hex[:24], takes_suspects=True, num_takers=8)
    store.release(store.claim([wanted], float("inf"))[0].jobs, "given_back", 5)


def _us(redis: Redis, way: Callable[[], object]) -> float:
    before = look(redis)
    for _ in range(TRIES):
        way()
    return 1e6 * since(redis, before).cpu_s / TRIES
