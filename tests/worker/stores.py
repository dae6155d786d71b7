"""What a worker does in Redis, step by step and by hand."""

from typing import Any
from uuid import uuid4

from redis import Redis
from rq.utils import now

from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob, Wanted
from worker.store.records.outcome import Outcome
from worker.store.records.results import pack


def worker_store(redis: Redis, name: str = "w", **options: Any) -> JobStore:
    return JobStore(redis, name, lease_s=30, **options)


def wanted(queue: str = "bulk", most: int = 10, token: str | None = None, **limits: Any) -> Wanted:
    return Wanted(queue, most, token or uuid4().hex[:24], **{"takes_suspects": True, **limits})


def claim(store: JobStore, queue: str = "bulk", most: int = 10) -> list[ClaimedJob]:
    return store.claim([wanted(queue, most)], float("inf"))[0].jobs


def succeeded(claimed: ClaimedJob, value: Any = 1) -> Outcome:
    return Outcome(claimed, "finished", value, now(), 1.0, packed=pack(value, 1 << 20))


def failed(claimed: ClaimedJob) -> Outcome:
    return Outcome(claimed, "failed", "ValueError: no", now(), 1.0, retries=True)


def end_leases(redis: Redis) -> None:
    """As when the workers that hold jobs have been silent for too long."""
    redis.delete(*redis.scan_iter("rq:execution:*"))
