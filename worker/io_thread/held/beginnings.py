"""Notes when held jobs begin, and shows their beginnings in Redis. A job's time limit counts from its beginning."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from worker.io_thread.held.held_jobs import HeldJob
from worker.io_thread.held.job_guard import JobGuard
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob


class _WaitingFunction(NamedTuple):
    """A function that waits until Redis shows its job as begun. hand_over: gives the function to a thread."""

    job: HeldJob
    hand_over: Callable[[], None]


class Beginnings:
    """Shows in Redis which jobs have begun, with one call in each turn of the loop. Used by the I/O thread only."""

    def __init__(self, guard: JobGuard, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard = guard
        self._clock = clock
        # By the job's number: the jobs that have begun, but that Redis does not show as begun yet.
        self._unshown: dict[int, HeldJob] = {}
        # By the job's number: the functions that begin once Redis shows their jobs as begun.
        self._functions: dict[int, _WaitingFunction] = {}

    def note_begun(self, job: HeldJob, moment: float) -> None:
        """Note that a job began at `moment` (monotonic seconds), unless it had begun before."""
        if job.began_clock_s is not None:
            return
        _start_clock(job, moment, now=self._clock())
        self._unshown[job.number] = job

    def run_once_shown(self, job: HeldJob, hand_over: Callable[[], None]) -> None:
        """Call `hand_over`, which gives the job's function to a thread, once Redis shows that the job has begun."""
        self._functions[job.number] = _WaitingFunction(job, hand_over)

    def forget(self, job: HeldJob) -> bool:
        """Forget a job. Returns whether its function was still waiting for a thread."""
        self._unshown.pop(job.number, None)
        return self._functions.pop(job.number, None) is not None

    def show(self, store: JobStore) -> list[ClaimedJob]:
        """Write new beginnings to Redis, then hand functions to threads. Returns the jobs that this worker has lost.

        After a RedisError, call this method again.
        """
        functions = list(self._functions.values())
        begun_jobs = list(self._unshown.values())
        begun_jobs += [function.job for function in functions]

        def write(jobs: Sequence[HeldJob]) -> Sequence[ClaimedJob]:
            """Write the beginnings of jobs. Returns the lost jobs."""
            # The job of a waiting function has no `began_at` yet. It begins now.
            now = datetime.now(UTC)
            return store.show_begun([(job.claimed, job.began_at or now) for job in jobs])

        lost_jobs = self._guard.batch(begun_jobs, job_of=lambda job: job, call=write)
        self._unshown.clear()
        self._hand_over(functions, lost_jobs)
        return lost_jobs

    def _hand_over(
        self, functions: Sequence[_WaitingFunction], lost_jobs: Sequence[ClaimedJob]
    ) -> None:
        """Hand functions to threads, except those of the jobs that this worker has lost."""
        lost_ids = {claimed.execution_id for claimed in lost_jobs}
        moment = self._clock()
        for job, hand_over in functions:
            if job.claimed.execution_id in lost_ids:
                continue
            if self._functions.pop(job.number, None) is None:
                continue  # the write raised for this job, so the guard has failed the job
            with self._guard.around(job):
                _start_clock(job, moment, now=moment)  # the function begins now
                hand_over()


def _start_clock(job: HeldJob, moment: float, now: float) -> None:
    """Note that a job began at `moment`. now: the present time. Both are in monotonic seconds."""
    age_s = now - moment
    job.began_clock_s = moment
    job.began_at = datetime.now(UTC) - timedelta(seconds=age_s)
    job.limit_s = job.claimed.record.limit_s
