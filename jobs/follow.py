"""Waits for a run and shows its progress."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rq.job import JobStatus

from .run_snapshot import RunSnapshot

#: Between two looks at Redis.
POLL_S = 0.5


class End(enum.Enum):
    """How waiting for a run ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    PLAN_FAILED = "planning failed"
    SHARDS_FAILED = "shards failed"
    STRANDED = "nothing is left to run, and the run did not finish"


class Display(Protocol):
    """Where progress goes."""

    def show(self, snapshot: RunSnapshot, tokens_per_s: float) -> None: ...
    def warn(self, text: str) -> None: ...


@dataclass(frozen=True)
class Followed:
    """The last look at a run, how it ended, and the seconds spent waiting."""

    snapshot: RunSnapshot
    end: End
    seconds: float


def follow(
    look: Callable[[], RunSnapshot],
    display: Display,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Followed:
    """Look at a run until it ends, however long no worker takes it up. clock: seconds, any zero."""
    started_at = clock()
    first = previous = look()
    snapshot = first
    has_worker = True
    while True:
        seconds = clock() - started_at
        display.show(snapshot, (snapshot.tokens - first.tokens) / seconds if seconds > 0 else 0.0)
        if end := _end(snapshot, previous):
            return Followed(snapshot, end, seconds)
        if has_worker != (snapshot.workers > 0):
            has_worker = not has_worker
            display.warn(_about_workers(snapshot))
        sleep(POLL_S)
        previous, snapshot = snapshot, look()


def _end(snapshot: RunSnapshot, previous: RunSnapshot) -> End | None:
    if snapshot.finished:
        return End.FINISHED
    if snapshot.cancelled:
        return End.CANCELLED
    if snapshot.plan_status in (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED):
        return End.PLAN_FAILED
    if not _is_idle(snapshot):
        return None
    if snapshot.failed:
        return End.SHARDS_FAILED
    # A look is not one instant: the last shard may have ended between two of its reads.
    return End.STRANDED if snapshot is not previous and _is_idle(previous) else None


def _is_idle(snapshot: RunSnapshot) -> bool:
    is_planned = snapshot.shards is not None and not snapshot.is_planning
    return is_planned and not snapshot.started and not snapshot.queued


def _about_workers(snapshot: RunSnapshot) -> str:
    if snapshot.workers:
        return f"{snapshot.workers} worker(s) listen on queue {snapshot.queue!r} now"
    return (
        f"no worker listens on queue {snapshot.queue!r}: start one with "
        f"`rq worker --worker-class worker.BatchWorker -S json {snapshot.queue}`; still waiting"
    )
