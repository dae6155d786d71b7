"""Tally: counts the events of a worker for its metrics."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import Completion
from jobs.common.display import safe_name
from jobs.common.workers import Point
from jobs.queues.numbers import QueueNumbers

#: Bounds of histograms, in seconds: vLLM's bounds, and longer bounds for the jobs of batches.
_SHORT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_LONG_S = (0.05, 0.25, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)

_MAX_REASONS = 40
"""The most names of errors that are counted separately. A user's function may raise errors of any name."""

_MAX_REASON_CHARS = 60

_MAX_DEATHS = 20
"""Takeovers of jobs with this many deaths or more are counted together."""

OTHER = "other"
"""Stands for the names of errors beyond _MAX_REASONS."""


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended on this worker.

    function_name: the name of its function; "refused" if the job was refused before the name was read.
    is_function: whether the job called a function that needs no engine.
    outcome: "finished", "failed" or "stopped". reason: the name of its error, or "".
    enqueued_at, began_at, ended_at: Unix seconds; None if not known. The producer wrote enqueued_at.
    rows, row_errors: the counts of a finished shard.
    rows_unasked: how many of the row errors came without a request to the engine; None if not known.
    """

    queue: str
    job_id: str
    function_name: str
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
    """Counts values between bounds. Only one thread may call `observe`.

    bounds: in ascending order. A value is counted at the first bound that it does not exceed.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # the sum of all values

    def observe(self, value: float) -> None:
        """Count a value."""
        # A value that exceeds all bounds is counted in the last element.
        position = bisect_left(self.bounds, value)
        self.counts[position] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bound in Prometheus' form, with the number of values that do not exceed it."""
        bounds = [str(float(bound)) for bound in self.bounds]
        bounds.append("+Inf")
        counts = list(self.counts)  # a copy, because another thread may call `observe` meanwhile
        count_so_far = 0
        counts_so_far = []
        for bound, count in zip(bounds, counts, strict=True):
            count_so_far += count
            counts_so_far.append((bound, float(count_so_far)))
        return counts_so_far


@dataclass(frozen=True)
class Statistics:
    """A worker's last statistics.

    jobs_by_queue: the number of jobs with each status, for each queue.
    held_by_kind: the number of held jobs, by queue and kind. A kind is "function" or "engine".
    engine_stats: the engine's counters.
    """

    state: str
    point: Point = field(default_factory=Point)
    jobs_by_queue: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held_by_kind: Mapping[tuple[str, str], int] = field(default_factory=dict)
    engine_stats: Mapping[str, Any] = field(default_factory=dict)


class Tally:
    """Counts events. Only the I/O thread writes, except for `count_sent` and `queue_numbers`. Any thread may read.

    jobs: ended jobs, by queue, outcome and reason. rows: the rows of finished shards, by queue, outcome and reason.
    samples: finished samples, by finish reason.
    takeovers: jobs that were taken over, by queue and by the job's number of deaths.
    queue_times: seconds from a job's enqueueing to its beginning, by queue.
    latencies: seconds from a job's enqueueing to its end, by queue.
    times_to_first_token, e2e_latencies: seconds from a request's arrival in the engine to its first token, or to its
    end.
    ended, ended_badly, waited_ms, ran_ms: totals by queue; see Point.
    num_replies: how many replies the I/O thread has got from Redis.
    queue_numbers: the numbers of the worker's queues; None if the worker runs no scheduler, or Redis does not answer.
    A thread of a pool sets them.
    """

    def __init__(self) -> None:
        self.statistics = Statistics("starting")
        self.queue_numbers: QueueNumbers | None = None
        self.jobs: Counter[tuple[str, str, str]] = Counter()
        self.rows: Counter[tuple[str, str, str]] = Counter()
        self.samples: Counter[str] = Counter()
        self.redis_errors: Counter[str] = Counter()
        self.num_finished = 0
        self.num_failed = 0
        self.rows_done = 0
        self.claims_lost = 0
        self.takeovers: Counter[tuple[str, int]] = Counter()
        self.unforeseen_errors: Counter[tuple[str, str]] = Counter()
        self.round_trips = Counter(worker=0, functions=0)
        self.num_replies = 0
        self._slowest_reply_s = 0.0
        self.ended: Counter[str] = Counter()
        self.ended_badly: Counter[str] = Counter()
        self.waited_ms: Counter[str] = Counter()
        self.ran_ms: Counter[str] = Counter()
        self.queue_times: dict[str, Histogram] = {}
        self.latencies: dict[str, Histogram] = {}
        self.times_to_first_token = Histogram(_SHORT_S)
        self.e2e_latencies = Histogram(_SHORT_S)
        self._known_labels: set[str] = set()
        self._lock = threading.Lock()

    def count_job(self, job: EndedJob, rows_done: int = 0) -> None:
        """Count a job that has ended. rows_done: the rows of its file that this worker has answered."""
        if job.outcome == "finished":
            self.num_finished += 1
            self.rows_done += rows_done
        else:
            self.num_failed += 1
        self.jobs[job.queue, job.outcome, self._reason_label(job.reason)] += 1
        if job.rows:
            self._count_rows(job)
        self._count_for_queue(job)
        if job.enqueued_at is not None:
            self._observe(self.latencies, job.queue, job.ended_at - job.enqueued_at)
            if job.began_at is not None:
                self._observe(self.queue_times, job.queue, job.began_at - job.enqueued_at)

    def _count_for_queue(self, job: EndedJob) -> None:
        """Count a job in its queue's totals, with the time that it has waited and run."""
        self.ended[job.queue] += 1
        if job.outcome != "finished":
            self.ended_badly[job.queue] += 1
        if job.began_at is None:
            return
        self.ran_ms[job.queue] += max(0, round(1000 * (job.ended_at - job.began_at)))
        if job.enqueued_at is not None:
            # The clock of a producer's machine may be ahead of this machine's.
            self.waited_ms[job.queue] += max(0, round(1000 * (job.began_at - job.enqueued_at)))

    def _count_rows(self, job: EndedJob) -> None:
        """Count the rows of a finished shard by outcome. A failed row that made no request is an error of the input."""
        self.rows[job.queue, "answered", ""] += job.rows - job.row_errors
        if job.rows_unasked is None:
            self.rows[job.queue, "error", ""] += job.row_errors
            return
        num_unasked = min(job.rows_unasked, job.row_errors)
        self.rows[job.queue, "error", "input"] += num_unasked
        self.rows[job.queue, "error", "request"] += job.row_errors - num_unasked

    def count_sample(self, completion: Completion) -> None:
        """Count a finished sample of a request."""
        self.samples[completion.finish_reason] += 1
        times = completion.metrics
        if times is None:
            return
        self.e2e_latencies.observe(times.finished_time - times.arrival_time)
        if times.first_token_time is not None:
            self.times_to_first_token.observe(times.first_token_time - times.arrival_time)

    def count_lost_claim(self) -> None:
        """Count a held job that was cancelled or taken over by another worker."""
        self.claims_lost += 1

    def count_takeover(self, queue: str, deaths: int) -> None:
        """Count a job that was taken over from a dead worker, or after a fault. deaths: the job's deaths so far."""
        self.takeovers[queue, min(deaths, _MAX_DEATHS)] += 1

    def count_unforeseen(self, queue: str, error: BaseException) -> None:
        """Count an unforeseen error about one job of this queue."""
        self.unforeseen_errors[queue, self._reason_label(type(error).__name__)] += 1

    def count_redis_error(self, error: BaseException) -> None:
        """Count a turn of the I/O thread in which Redis refused a command, or did not answer."""
        self.redis_errors[type(error).__name__] += 1

    def count_reply(self, seconds: float) -> None:
        """Count a reply of Redis to the I/O thread. seconds: how long it took."""
        self.num_replies += 1
        self._slowest_reply_s = max(self._slowest_reply_s, seconds)

    def take_slowest_reply_s(self) -> float:
        """Return how many seconds the slowest reply has taken since this method was last called."""
        seconds = self._slowest_reply_s
        self._slowest_reply_s = 0.0
        return seconds

    def count_sent(self, client: str) -> None:
        """Count a command or pipeline to Redis. Any thread may call this.

        client: "worker", or "functions" for user code.
        """
        with self._lock:
            self.round_trips[client] += 1

    def _observe(self, histograms: dict[str, Histogram], queue: str, seconds: float) -> None:
        """Add seconds to a queue's histogram. Negative seconds, which come from another machine's clock, count as 0."""
        if queue not in histograms:
            histograms[queue] = Histogram(_LONG_S)
        histograms[queue].observe(max(0.0, seconds))

    def _reason_label(self, reason: str) -> str:
        """Return the label for an error's name: the name, OTHER if there are too many names, or "" for no error."""
        if not reason:
            return ""
        label = safe_name(reason, _MAX_REASON_CHARS)
        if label not in self._known_labels:
            if len(self._known_labels) >= _MAX_REASONS:
                return OTHER
            self._known_labels.add(label)
        return label
