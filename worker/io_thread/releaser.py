"""Puts jobs back into their queues."""

import logging
from collections.abc import Sequence

from worker.io_thread.faults import WorkerFault
from worker.io_thread.job_runner import JobRunner
from worker.io_thread.parts import Parts
from worker.store.records.claimed_job import ClaimedJob, Mode


class Releaser:
    """Gives jobs back, and ends those that may not go back. log_level: of the count. Used by the I/O thread only."""

    def __init__(self, parts: Parts, runner: JobRunner) -> None:
        self._store, self._runner, self._log = parts.store, runner, parts.log
        self._max_deaths = parts.limits.max_worker_deaths
        self._waiting: list[ClaimedJob] = []
        self.log_level = logging.DEBUG

    def give_back(self, held: Sequence[ClaimedJob], mode: Mode) -> None:
        """Put jobs back into their queues, or keep them for the next call while Redis does not answer."""
        self._waiting.extend(held)
        if not self._waiting:
            return
        for claimed in self._store.release(self._waiting, mode, self._max_deaths):
            self._runner.take_over(claimed, self._max_deaths)
        self._log.log(self.log_level, "gave back %d jobs", len(self._waiting))
        self._waiting.clear()

    def give_back_faulty(self, fault: WorkerFault) -> None:
        """Put a job back after a fault of this worker's."""
        mode: Mode = "fault" if fault.counts else "given_back"
        for claimed in self._store.release([fault.claimed], mode, self._max_deaths):
            self._runner.take_over(claimed, self._max_deaths, fault)

    def take_up_abandoned(self, queue_names: Sequence[str], period_s: float) -> None:
        """Put back jobs whose worker died; at most one worker looks in each period."""
        for claimed in self._store.reclaim_abandoned(queue_names, period_s, self._max_deaths):
            self._runner.take_over(claimed, self._max_deaths)
