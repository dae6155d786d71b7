"""Counts events of a worker's threads for its metrics."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import Completion
from jobs.common.display import safe_name
from jobs.common.workers import Point

#: Seconds: as vLLM's, and longer ones for batches.
_SHORT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_LONG_S = (0.05, 0.25, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)

_MAX_REASONS = 40
"""Names of errors that are told apart: a user's function may raise any."""
_MAX_REASON_CHARS = 60
_MAX_DEATHS_TOLD = 20
OTHER = "other"


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended on this worker.

    outcome: "finished", "failed" or "stopped"; reason: the error's name, or "".
    function: its name, or "refused"; is_function: it needed no engine.
    enqueued_at, began_at, ended_at: Unix seconds, the first as producers wrote it; None if not known.
    rows, row_errors: of a finished shard. rows_unasked: errors without a prompt; None if not known.
    """

    queue: str
    job_id: str
    function: str
    is_function: bool
    outcome: str
    reason: str
    enqueued_at: float | None
    began_at: float | None
    ended_at: float
    rows: int = 0
    row_errors: int = 0
    rows_unasked: int | None = None


class Histogram:
    """Counts values up to each of `bounds`, in order, and above. Written by one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bound, as Prometheus writes it, and how many values were no larger."""
        counts, found, below = list(self.counts), [], 0
        for bound, number in zip((*(f"{float(each)}" for each in self.bounds), "+Inf"), counts, strict=True):
            below += number
            found.append((bound, float(below)))
        return found


@dataclass(frozen=True)
class Shown:
    """A worker's last statistics.

    queued: by queue and status. held: by queue and kind, "function" or "engine". engine_stats: the engine's counters.
    """

    state: str
    point: Point = field(default_factory=Point)
    queued: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)
    engine_stats: Mapping[str, Any] = field(default_factory=dict)


class Tally:
    """Counts events. The I/O thread writes all but commands to Redis; other threads may read."""

    def __init__(self) -> None:
        self.shown = Shown("starting")
        self.jobs: Counter[tuple[str, str, str]] = Counter()
        self.rows: Counter[tuple[str, str, str]] = Counter()
        self.requests: Counter[str] = Counter()
        self.redis_errors: Counter[str] = Counter()
        self.num_finished = self.num_failed = self.rows_done = 0
        self.claims_lost = 0
        self.takeovers: Counter[tuple[str, int]] = Counter()
        self.unforeseen_errors: Counter[tuple[str, str]] = Counter()
        self.round_trips = Counter(worker=0, functions=0)
        self.queue_times: dict[str, Histogram] = {}
        self.latencies: dict[str, Histogram] = {}
        self.first_token, self.e2e = Histogram(_SHORT_S), Histogram(_SHORT_S)
        self._reasons: set[str] = set()
        self._lock = threading.Lock()

    def job_ended(self, job: EndedJob, rows_done: int = 0) -> None:
        """Count a job that has ended. rows_done: of its file, answered here."""
        if job.outcome == "finished":
            self.num_finished += 1
            self.rows_done += rows_done
        else:
            self.num_failed += 1
        self.jobs[job.queue, job.outcome, self._reason(job.reason)] += 1
        if job.rows:
            self._count_rows(job)
        if job.enqueued_at is not None:
            self._observe(self.latencies, job.queue, job.ended_at - job.enqueued_at)
            if job.began_at is not None:
                self._observe(self.queue_times, job.queue, job.began_at - job.enqueued_at)

    def _count_rows(self, job: EndedJob) -> None:
        self.rows[job.queue, "answered", ""] += job.rows - job.row_errors
        if job.rows_unasked is None:
            self.rows[job.queue, "error", ""] += job.row_errors
            return
        unasked = min(job.rows_unasked, job.row_errors)
        self.rows[job.queue, "error", "input"] += unasked
        self.rows[job.queue, "error", "request"] += job.row_errors - unasked

    def completed(self, completion: Completion) -> None:
        """Count a sample of a request that the engine has finished."""
        self.requests[completion.finish_reason] += 1
        if (told := completion.metrics) is not None:
            self.e2e.observe(told.finished_time - told.arrival_time)
            if told.first_token_time is not None:
                self.first_token.observe(told.first_token_time - told.arrival_time)

    def lost(self) -> None:
        """Count a held job that was cancelled or belongs to another worker by now."""
        self.claims_lost += 1

    def taken_over(self, queue: str, deaths: int) -> None:
        """Count a job taken over from a dead worker, or after a fault. deaths: how many of these it has had."""
        self.takeovers[queue, min(deaths, _MAX_DEATHS_TOLD)] += 1

    def unforeseen(self, queue: str, error: BaseException) -> None:
        """Count an error that nobody foresaw, about one job of this queue."""
        self.unforeseen_errors[queue, self._reason(type(error).__name__)] += 1

    def redis_failed(self, error: BaseException) -> None:
        """Count a turn of the I/O thread that Redis has refused or not answered."""
        self.redis_errors[type(error).__name__] += 1

    def sent(self, client: str) -> None:
        """Count a command, or pipeline of them, that the "worker" or users' "functions" send; in any thread."""
        with self._lock:
            self.round_trips[client] += 1

    def _observe(self, histograms: dict[str, Histogram], queue: str, seconds: float) -> None:
        """Observe seconds, 0 if another machine's clock makes them negative."""
        if queue not in histograms:
            histograms[queue] = Histogram(_LONG_S)
        histograms[queue].observe(max(0.0, seconds))

    def _reason(self, reason: str) -> str:
        reason = safe_name(reason, _MAX_REASON_CHARS)
        if reason and reason not in self._reasons:
            if len(self._reasons) >= _MAX_REASONS:
                return OTHER
            self._reasons.add(reason)
        return reason
