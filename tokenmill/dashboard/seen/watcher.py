"""Looks at Redis for all open pages together, as seldom as possible."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from redis import Redis

from jobs.common.workers import Worker, WorkerSample, read_workers, worker_names
from jobs.queues import QueueCounts, count_queues, queue_names
from jobs.runs.watching.reading import list_runs
from jobs.runs.watching.snapshot import RunSnapshot
from tokenmill.dashboard.seen.growth import Rates, read_points
from tokenmill.dashboard.seen.jobs_seen import FailedJob, newest_failed

T = TypeVar("T")

#: Seconds for which one look serves all pages; after a slow look, five times the seconds that it took.
LOOK_S = 1.0
LOOK_SHARE = 0.2

#: The most workers, queues, runs and failed jobs that are looked at. The page says if there are more.
MAX_WORKERS, MAX_QUEUES, MAX_RUNS, MAX_FAILED = 1000, 200, 50, 10

#: The points that are read of a worker that was not seen before. They tell how fast it is.
NUM_POINTS = 2


@dataclass(frozen=True)
class WorkerRow:
    """One worker. sample: None for a worker that reports nothing, such as RQ's own. serves: the names of its queues.

    Rates are per second; None if they are not known yet.
    """

    name: str
    state: str
    queues: str
    serves: tuple[str, ...] = ()
    sample: WorkerSample | None = None
    generated_per_s: float | None = None
    prompt_per_s: float | None = None

    @property
    def is_silent(self) -> bool:
        return self.state == "silent"


@dataclass(frozen=True)
class Look:
    """What Redis said at one moment."""

    at: float
    queues: tuple[QueueCounts, ...] = ()
    num_queues: int = 0
    workers: tuple[WorkerRow, ...] = ()
    num_workers: int = 0
    runs: tuple[RunSnapshot, ...] = ()

    def total(self, where: str) -> int:
        """How many jobs of all queues are there: "waiting", "executing", "failed", ..."""
        return sum(queue.counts[where] for queue in self.queues)

    def rate(self, name: str) -> float:
        """A rate of all workers together that tell of themselves now, by its name in WorkerRow."""
        return sum(getattr(worker, name) or 0.0 for worker in self.workers if not worker.is_silent)


class _Kept(Generic[T]):
    """Reads something, and serves it for a while."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._last: T | None = None
        self._serves_until = 0.0

    def get(self) -> T:
        """Return what was read lately, or read it again."""
        began = time.monotonic()
        if self._last is None or began >= self._serves_until:
            self._last = self._read()
            now = time.monotonic()
            self._serves_until = now + max(LOOK_S, (now - began) / LOOK_SHARE)
        return self._last


class Watcher:
    """Reads Redis in the calling thread; safe to call from many. clock: Unix seconds."""

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.time) -> None:
        self.connection, self.clock = connection, clock
        self._rates = Rates()
        self._lock = threading.RLock()
        self._kept_look = _Kept(self._look)
        self._kept_failed = _Kept(self._failed)

    def look(self) -> Look:
        """Return how everything stands, as it was LOOK_S ago at most. Raises redis.exceptions.RedisError."""
        with self._lock:
            return self._kept_look.get()

    def newest_failed(self) -> Sequence[FailedJob]:
        """Return the newest failed jobs of all queues, as they were LOOK_S ago at most. Raises RedisError."""
        with self._lock:
            return self._kept_failed.get()

    def _failed(self) -> Sequence[FailedJob]:
        queues = [queue.name for queue in self.look().queues if queue.counts["failed"]]
        # Most of the time there is nothing to read.
        return newest_failed(self.connection, queues, MAX_FAILED) if queues else []

    def _look(self) -> Look:
        now = self.clock()
        all_queues, all_workers = queue_names(self.connection), worker_names(self.connection)
        queues = count_queues(self.connection, all_queues[:MAX_QUEUES])
        names = all_workers[:MAX_WORKERS]
        workers = read_workers(self.connection, names)
        self._remember([each.sample for each in workers if each.sample is not None])
        # A run may wait for workers that are not looked at here.
        workers_of_runs = workers if len(names) == len(all_workers) else None
        return Look(
            at=now,
            queues=tuple(sorted(queues, key=_busiest)),
            num_queues=len(all_queues),
            workers=self._rows(workers),
            num_workers=len(all_workers),
            runs=tuple(list_runs(self.connection, MAX_RUNS, workers=workers_of_runs)),
        )

    def _remember(self, samples: Sequence[WorkerSample]) -> None:
        """Take note of how far workers are, for their rates."""
        new = [sample.name for sample in samples if not self._rates.knows(sample.name)]
        earlier = read_points(self.connection, new, NUM_POINTS) if new else {}
        for sample in samples:
            for point in (*earlier.get(sample.name, ()), sample):
                self._rates.add(sample.name, point)
        self._rates.forget([sample.name for sample in samples])

    def _rows(self, workers: Sequence[Worker]) -> tuple[WorkerRow, ...]:
        """Return a row for each worker, those first that somebody should look at."""
        rows, rate = [], self._rates.rate
        for worker in workers:
            name, sample, seen = worker.name, worker.sample, worker.registered
            if sample is None:
                state = seen.get("state", "unknown")
                rows.append(WorkerRow(name, state, seen.get("queues", ""), tuple(worker.queues)))
                continue
            state = "silent" if sample.is_silent else sample.state or "unknown"
            rates = rate(name, "generation_tokens"), rate(name, "prompt_tokens")
            serves = tuple(sample.queues)
            rows.append(WorkerRow(name, state, ", ".join(serves), serves, sample, *rates))
        return tuple(
            sorted(rows, key=lambda row: (not row.is_silent, row.state != "draining", row.name))
        )


def _busiest(queue: QueueCounts) -> tuple[int, str]:
    return -sum(queue.counts[where] for where in ("waiting", "executing", "failed")), queue.name
