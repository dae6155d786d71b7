"""Shows in Redis and in the log what a worker is doing."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jobs.common.workers import MAX_HELD_NAMED, POINT_PERIOD_S, RESTORED, Point
from worker.io_thread.job_runner import JobRunner
from worker.io_thread.limits import Timer
from worker.io_thread.parts import Parts
from worker.logs import LastingTrouble
from worker.metrics.tally import Statistics
from worker.store.records.claimed_job import Hold
from worker.store.worker_record import WorkerRecord

RECORD_PERIOD_S = 2.0
"""Seconds between two writings of the worker's record in Redis."""

LOG_PERIOD_S = 10.0
"""Seconds between two lines of throughput in the log."""

CLOCK_PERIOD_S = 10.0
"""Seconds between two readings of Redis' clock."""

SLOW_S = 1.0
"""An answer of Redis that takes longer is slow. A healthy Redis answers within a few milliseconds."""


class Reporter:
    """Shows the worker's state and statistics every few seconds.

    engine_stats: the engine's counters, set by the I/O loop after each step.
    """

    def __init__(self, parts: Parts, record: WorkerRecord, runner: JobRunner) -> None:
        self._record = record
        self._poll_rates = parts.poll_rates
        self._runner = runner
        self._log = parts.log
        self._max_num_seqs = parts.packer.slots

        self._record_timer = Timer(RECORD_PERIOD_S)
        self._log_timer = Timer(LOG_PERIOD_S)
        self._point_timer = Timer(POINT_PERIOD_S)

        self._client = parts.clients.io
        self._redis_clock = parts.redis_clock
        self._clock_timer = Timer(CLOCK_PERIOD_S)
        self._skew = LastingTrouble(
            parts.log, "this machine's clock agrees with Redis' again", logging.WARNING, parts.clock
        )
        self._slowness = LastingTrouble(
            parts.log, "Redis answers quickly again", logging.WARNING, parts.clock
        )

        self.clock_warning = ""
        self._was_busy = False
        self.engine_stats: Mapping[str, Any] = {}

    def show_soon(self) -> None:
        """Let the next `show` write the record, even if it is not due."""
        self._record_timer.end_now()

    def show(self, moment: float, is_serving: bool, hold: Hold) -> None:
        """Write the worker's record if it is due, or if the worker has become busy or idle. Raises NameTaken.

        hold: why no worker may claim jobs; "" if workers may claim.
        """
        if self._clock_timer.due(moment):
            self._check_clock_and_speed()

        is_busy = self._runner.num_held > 0
        if not self._record_timer.due(moment) and is_busy == self._was_busy:
            return
        self._was_busy = is_busy

        held_jobs = self._runner.held
        if not is_serving:
            state = "draining"
        elif hold == RESTORED:
            state = RESTORED
        elif held_jobs:
            state = "busy"
        else:
            state = hold or "idle"
        oldest_id = held_jobs[0].job_id if held_jobs else None
        self._write(state, oldest_id)

        if self._point_timer.due(moment):
            self._record.add_point(self._runner.tally.statistics.point)

    def _check_clock_and_speed(self) -> None:
        """Ask Redis for its time. Warn if this machine's clock differs from it, or if Redis has been slow lately."""
        self._redis_clock.sync(self._client)
        self.clock_warning = self._redis_clock.warning
        if self.clock_warning:
            self._skew.note("skew", "%s", self.clock_warning)
        else:
            self._skew.note_absence()

        slowest_s = self._runner.tally.take_slowest_reply_s()
        if slowest_s > SLOW_S:
            self._slowness.note(
                "slow",
                "Redis took %.1f s to answer: look at its CPU, its disk and `redis-cli SLOWLOG GET`",
                slowest_s,
            )
        else:
            self._slowness.note_absence()

    def show_stopped(self) -> None:
        """Write the final statistics."""
        self._write("stopped")
        self._record.add_point(self._runner.tally.statistics.point)

    def log_throughput(self, moment: float) -> None:
        """Log the throughput if it is due and jobs are held."""
        if not self._runner.num_held or not self._log_timer.due(moment):
            return
        counts = self._runner.tally
        self._log.info(
            "%d jobs held, %d finished, %d failed; %d sequences running, %d waiting; %d tokens answered",
            self._runner.num_held,
            counts.num_finished,
            counts.num_failed,
            self.engine_stats.get("num_running", 0),
            self.engine_stats.get("num_waiting", 0),
            self._runner.streams.completion_tokens,
        )

    def _write(self, state: str, job_id: str | None = None) -> None:
        """Note the statistics for the metrics, and write them to Redis. job_id: one of the held jobs, if any."""
        # Redis may not answer below. So the statistics are first noted with the previous numbers of jobs.
        self._note_statistics(state, self._runner.tally.statistics.jobs_by_queue)
        jobs_by_queue, workers_by_queue = self._record.count()
        num_started = sum(by_status["started"] for by_status in jobs_by_queue.values())
        self._poll_rates.note_load(workers_by_queue, num_started)
        self._note_statistics(state, jobs_by_queue)

        num_claimed = {queue: by_status["claimed"] for queue, by_status in jobs_by_queue.items()}
        counters = {**self._counters(), "claimed": num_claimed}
        self._record.show(state, job_id, counters, self._runner.tally.statistics.point)

    def _note_statistics(self, state: str, jobs_by_queue: Mapping[str, Mapping[str, int]]) -> None:
        """Note the statistics for the metrics. jobs_by_queue: the number of jobs by queue and status."""
        num_queued = {queue: by_status["queued"] for queue, by_status in jobs_by_queue.items()}
        held_by_kind = Counter[tuple[str, str]]()
        for job in self._runner.jobs:
            kind = "function" if job.is_function else "engine"
            held_by_kind[job.claimed.queue_name, kind] += 1
        self._runner.tally.statistics = Statistics(
            state, self._point(num_queued), jobs_by_queue, held_by_kind, self.engine_stats
        )

    def _point(self, num_queued: Mapping[str, int]) -> Point:
        """Return the present statistics as a point. num_queued: how many jobs wait, by queue."""
        stats = self.engine_stats
        counts = self._runner.tally
        cached_tokens = stats.get("cached_tokens", 0)
        num_blocks = stats.get("num_blocks", 0)
        kv_cache_usage = 0.0
        if num_blocks:
            kv_cache_usage = 1 - stats.get("free_blocks", 0) / num_blocks
        return Point(
            at=time.time(),
            prompt_tokens=stats.get("prefill_tokens", 0) + cached_tokens,
            cached_tokens=cached_tokens,
            generation_tokens=stats.get("generation_tokens", 0),
            num_requests_running=stats.get("num_running", 0),
            num_requests_waiting=stats.get("num_waiting", 0),
            max_num_seqs=self._max_num_seqs,
            num_preemptions=stats.get("num_preemptions", 0),
            kv_cache_usage=kv_cache_usage,
            jobs_held=self._runner.num_held,
            jobs_finished=counts.num_finished,
            jobs_failed=counts.num_failed,
            rows=counts.rows_done + self._runner.num_rows_done(),
            depth=num_queued,
            ended=dict(counts.ended),
            ended_badly=dict(counts.ended_badly),
            waited_ms=dict(counts.waited_ms),
            ran_ms=dict(counts.ran_ms),
        )

    def _counters(self) -> dict[str, Any]:
        """Return the statistics that the worker's record holds in addition to those of `_point`."""
        held_jobs = self._runner.held
        return {
            **self.engine_stats,
            "held": Counter(job.queue_name for job in held_jobs),
            "held_jobs": [job.job_id for job in held_jobs[:MAX_HELD_NAMED]],
            "completion_tokens": self._runner.streams.completion_tokens,
            "stuck_threads": self._runner.threads.num_stuck,
        }
