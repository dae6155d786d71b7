"""Shows in Redis which held jobs have begun, and starts their clocks."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from worker.io_thread.held.held_jobs import HeldJob
from worker.io_thread.held.job_guard import JobGuard
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob


class Beginnings:
    """Shows in Redis which jobs have begun, all of a turn in one call. Used by the I/O thread only."""

    def __init__(self, guard: JobGuard, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard, self._clock = guard, clock
        self._news: dict[int, HeldJob] = {}
        self._functions: dict[int, tuple[HeldJob, Callable[[], None]]] = {}

    def began(self, job: HeldJob, moment: float) -> None:
        """Note that a job has begun at `moment` (monotonic seconds), unless it had before."""
        if job.started_at is not None:
            return
        _start_clock(job, moment, self._clock())
        self._news[job.number] = job

    def run(self, job: HeldJob, function: Callable[[], None]) -> None:
        """Call `function` once Redis shows that the job begins. It hands the job's function to a thread."""
        self._functions[job.number] = (job, function)

    def forget(self, job: HeldJob) -> bool:
        """Forget a job. Return whether its function was still to be handed over."""
        self._news.pop(job.number, None)
        return self._functions.pop(job.number, None) is not None

    def show(self, store: JobStore) -> list[ClaimedJob]:
        """Write new beginnings, then hand functions over. Return lost jobs. Call it again after a RedisError."""
        functions = list(self._functions.values())
        begun = [*self._news.values(), *(job for job, _ in functions)]
        lost = self._guard.batch(begun, lambda job: job, lambda jobs: store.begin(list(map(_beginning_of, jobs))))
        self._news.clear()
        gone = {claimed.execution_id for claimed in lost}
        moment = self._clock()
        for job, hand_over in functions:
            if job.claimed.execution_id not in gone and self._functions.pop(job.number, None) is not None:
                with self._guard.around(job):
                    _start_clock(job, moment, moment)
                    hand_over()
        return lost


def _beginning_of(job: HeldJob) -> tuple[ClaimedJob, datetime]:
    return job.claimed, job.began_at or datetime.now(UTC)


def _start_clock(job: HeldJob, moment: float, present: float) -> None:
    job.started_at = moment
    job.began_at = datetime.now(UTC) - timedelta(seconds=present - moment)
    job.limit_s = job.claimed.record.limit_s
