"""Reads the state of queues, workers and runs. All open pages share one reading, until it is too old."""

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

#: The fewest seconds for which what was read serves all pages.
LOOK_S = 1.0
#: The most of the time that is spent reading: after a slow reading, its result serves longer.
LOOK_SHARE = 0.2

#: The most workers, queues, runs and failed jobs that are read. The page says if there are more workers or queues.
MAX_WORKERS = 1000
MAX_QUEUES = 200
MAX_RUNS = 50
MAX_FAILED = 10

#: How many stored points of a new worker are read. Two are enough for its rate.
NUM_POINTS = 2


@dataclass(frozen=True)
class WorkerRow:
    """One worker.

    queues: the names of its queues as one text. serves: the same names. sample: None for a worker that reports nothing,
    such as a worker of RQ. generated_per_s, prompt_per_s: tokens per second; None if the rate is not known yet.
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
        """Whether the worker has reported nothing for too long."""
        return self.state == "silent"


@dataclass(frozen=True)
class Look:
    """The state of queues, workers and runs at one moment.

    at: Unix seconds. queues, workers, runs: at most MAX_QUEUES, MAX_WORKERS and MAX_RUNS of them.
    num_queues, num_workers: how many there are in Redis.
    """

    at: float
    queues: tuple[QueueCounts, ...] = ()
    num_queues: int = 0
    workers: tuple[WorkerRow, ...] = ()
    num_workers: int = 0
    runs: tuple[RunSnapshot, ...] = ()

    def total(self, place: str) -> int:
        """Return how many jobs are at a place in all queues together. place: one of `jobs.queues.PLACES`."""
        return sum(queue.counts[place] for queue in self.queues)

    def rate(self, name: str) -> float:
        """Return the sum of a rate over all workers that are not silent. name: the rate's field in WorkerRow."""
        return sum(getattr(worker, name) or 0.0 for worker in self.workers if not worker.is_silent)


class _Cached(Generic[T]):
    """A value that is read again when it is too old: see LOOK_S and LOOK_SHARE."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._value: T | None = None
        self._expires_at = 0.0

    def get(self) -> T:
        """Return the value. Read it first if it is too old."""
        began_at = time.monotonic()
        if self._value is None or began_at >= self._expires_at:
            self._value = self._read()
            now = time.monotonic()
            read_s = now - began_at
            self._expires_at = now + max(LOOK_S, read_s / LOOK_SHARE)
        return self._value


class Watcher:
    """Reads the state of queues, workers and runs, in the calling thread. Safe to call from many threads.

    clock: Unix seconds.
    """

    def __init__(self, connection: Redis, clock: Callable[[], float] = time.time) -> None:
        self.connection = connection
        self.clock = clock
        self._rates = Rates()
        self._lock = threading.RLock()
        self._cached_look = _Cached(self._read_look)
        self._cached_failed = _Cached(self._read_failed)

    def look(self) -> Look:
        """Return the state of queues, workers and runs. Read it again if it is too old (see LOOK_S).

        Raises RedisError.
        """
        with self._lock:
            return self._cached_look.get()

    def newest_failed(self) -> Sequence[FailedJob]:
        """Return the newest failed jobs of all queues. Read them again if they are too old (see LOOK_S).

        Raises RedisError.
        """
        with self._lock:
            return self._cached_failed.get()

    def _read_failed(self) -> Sequence[FailedJob]:
        """Read the newest failed jobs of all queues."""
        queues = [queue.name for queue in self.look().queues if queue.counts["failed"]]
        if not queues:
            return []
        return newest_failed(self.connection, queues, MAX_FAILED)

    def _read_look(self) -> Look:
        """Read the state of queues, workers and runs."""
        now = self.clock()
        all_queues = queue_names(self.connection)
        all_workers = worker_names(self.connection)
        queues = count_queues(self.connection, all_queues[:MAX_QUEUES])
        names = all_workers[:MAX_WORKERS]
        workers = read_workers(self.connection, names)
        self._remember([worker.sample for worker in workers if worker.sample is not None])
        # A run may wait for any worker. If some were not read here, list_runs gets None and reads all of them.
        workers_of_runs = workers if len(names) == len(all_workers) else None
        return Look(
            at=now,
            queues=tuple(sorted(queues, key=_busiest_first)),
            num_queues=len(all_queues),
            workers=self._rows(workers),
            num_workers=len(all_workers),
            runs=tuple(list_runs(self.connection, MAX_RUNS, workers=workers_of_runs)),
        )

    def _remember(self, samples: Sequence[WorkerSample]) -> None:
        """Add the samples to the rates, and the stored points of workers that are new."""
        new_names = [sample.name for sample in samples if not self._rates.knows(sample.name)]
        stored_points = read_points(self.connection, new_names, NUM_POINTS) if new_names else {}
        for sample in samples:
            for point in stored_points.get(sample.name, ()):
                self._rates.add(sample.name, point)
            self._rates.add(sample.name, sample)
        self._rates.keep_only([sample.name for sample in samples])

    def _rows(self, workers: Sequence[Worker]) -> tuple[WorkerRow, ...]:
        """Return a row for each worker: silent workers first, then draining ones, then all others."""
        rows = [self._row(worker) for worker in workers]
        rows.sort(key=lambda row: (not row.is_silent, row.state != "draining", row.name))
        return tuple(rows)

    def _row(self, worker: Worker) -> WorkerRow:
        """Return the row of a worker: from its sample, or from RQ's registration if it reports nothing."""
        sample = worker.sample
        if sample is None:
            return WorkerRow(
                worker.name,
                state=worker.registered.get("state", "unknown"),
                queues=worker.registered.get("queues", ""),
                serves=tuple(worker.queues),
            )
        state = sample.state or "unknown"
        return WorkerRow(
            worker.name,
            state="silent" if sample.is_silent else state,
            queues=", ".join(sample.queues),
            serves=tuple(sample.queues),
            sample=sample,
            generated_per_s=self._rates.rate(worker.name, "generation_tokens"),
            prompt_per_s=self._rates.rate(worker.name, "prompt_tokens"),
        )


def _busiest_first(queue: QueueCounts) -> tuple[int, str]:
    """Return a sort key that puts the queues with most waiting, running and failed jobs first."""
    counts = queue.counts
    num_jobs = counts["waiting"] + counts["executing"] + counts["failed"]
    return -num_jobs, queue.name
