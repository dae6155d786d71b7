"""When a job begins: the first of its sequences is scheduled, or its function is handed to a thread.

Until then a job that this worker has claimed looks as it did in the queue, and its time does not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from worker.io_thread.held.held_jobs import HeldJob
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob


class Beginnings:
    """Notes which jobs have begun and shows it in Redis, in one call for all of a turn. The I/O thread's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._news: dict[int, HeldJob] = {}
        self._functions: dict[int, tuple[HeldJob, Callable[[], None]]] = {}

    def began(self, job: HeldJob, moment: float) -> None:
        """A job has begun at `moment` (monotonic seconds), unless it had before."""
        if job.started_at is not None:
            return
        _start_clock(job, moment, self._clock())
        self._news[job.number] = job

    def run(self, job: HeldJob, function: Callable[[], None]) -> None:
        """Call `function`, which hands the job's function to a thread, once Redis shows that it begins."""
        self._functions[job.number] = (job, function)

    def forget(self, job: HeldJob) -> bool:
        """Drop what is not shown yet of a job. Returns whether its function was not handed over."""
        self._news.pop(job.number, None)
        return self._functions.pop(job.number, None) is not None

    def show(self, store: JobStore) -> list[ClaimedJob]:
        """Write what began since the last call, then hand functions over. After a RedisError call it again.

        Returns the jobs that are no longer this worker's; their functions are not handed over.
        """
        functions = list(self._functions.values())
        begun = [(job.claimed, job.began_at or datetime.now(UTC)) for job in self._news.values()]
        begun += [(job.claimed, datetime.now(UTC)) for job, _ in functions]
        if not begun:
            return []
        lost = store.begin(begun)
        self._news.clear()
        gone = {claimed.execution_id for claimed in lost}
        moment = self._clock()
        for job, hand_over in functions:
            if job.claimed.execution_id not in gone:
                del self._functions[job.number]
                _start_clock(job, moment, moment)
                hand_over()
        return lost


def _start_clock(job: HeldJob, moment: float, present: float) -> None:
    job.started_at = moment
    job.began_at = datetime.now(UTC) - timedelta(seconds=present - moment)
    job.limit_s = job.claimed.record.limit_s
