"""What a worker does in Redis, step by step and by hand."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from redis import Redis
from rq.utils import now

from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob, ClaimRequest, Mode
from worker.store.records.outcome import Outcome, pack


def worker_store(redis: Redis, name: str = "w", **options: Any) -> JobStore:
    return JobStore(redis, name, lease_s=30, **options)


def wanted(
    queue: str = "bulk", most: int = 10, token: str | None = None, **limits: Any
) -> ClaimRequest:
    return ClaimRequest(
        queue, most, token or uuid4().hex[:24], **{"takes_suspects": True, **limits}
    )


def claim(store: JobStore, queue: str = "bulk", most: int = 10) -> list[ClaimedJob]:
    return store.claim([wanted(queue, most)], float("inf"))[0].jobs


def succeeded(claimed: ClaimedJob, value: Any = 1) -> Outcome:
    return Outcome(claimed, "finished", value, now(), 1.0, packed=pack(value, 1 << 20))


def failed(claimed: ClaimedJob) -> Outcome:
    return Outcome(claimed, "failed", "ValueError: no", now(), 1.0, may_retry=True)


def release(
    store: JobStore, held: Sequence[ClaimedJob], mode: Mode, max_deaths: int = 5
) -> list[ClaimedJob]:
    """Put jobs back; return those that the store's worker holds then, to end them."""
    return [
        each.claimed for each in store.release(held, mode, max_deaths) if each.claimed is not None
    ]


def take_up_abandoned(store: JobStore, queues: Sequence[str]) -> list[ClaimedJob]:
    return release(store, store.find_abandoned(queues, 1.0), "abandoned")


def end_leases(redis: Redis) -> None:
    """As when the workers that hold jobs have been silent for too long."""
    redis.delete(*redis.scan_iter("rq:execution:*"))
