"""Releases: gives jobs back to their queues, and ends jobs that may not run again."""

import logging
from collections.abc import Callable, Mapping, Sequence

from worker.errors import JobSetAside
from worker.io_thread.faults import WorkerFault
from worker.io_thread.held.held_jobs import HeldJob
from worker.io_thread.held.job_guard import JobGuard
from worker.io_thread.job_ends import JobEnds
from worker.io_thread.parts import Parts
from worker.store.job_store import ReleasedJob
from worker.store.records.claimed_job import ClaimedJob, Mode

_NOT_BEGUN = "a worker that had not begun it"

_REASONS: Mapping[Mode, str] = {
    "given_back": "which gave it back",
    "engine_died": "whose engine failed",
    "fault": "whose machine met a fault",
    "abandoned": "whose lease ended",
}
"""Why a job is taken from a worker, for the log."""


class Releases:
    """Gives the jobs of this worker and of dead workers back to their queues. Used by the I/O thread only.

    A job with which too many workers have died is ended instead.
    end_at_once: called with a job and a function. Holds the job, then calls the function, which ends the job.
    """

    def __init__(
        self,
        parts: Parts,
        guard: JobGuard,
        ends: JobEnds,
        end_at_once: Callable[[ClaimedJob, Callable[[HeldJob], None]], None],
    ) -> None:
        self._store = parts.store
        self._tally = parts.tally
        self._log = parts.log
        self._max_deaths = parts.limits.max_worker_deaths
        self._guard = guard
        self._ends = ends
        self._end_at_once = end_at_once
        self._waiting = list[ClaimedJob]()  # to be given back once Redis answers
        self.log_level = logging.DEBUG
        """The level of log lines that say how many jobs were given back."""

    def give_back(self, jobs: Sequence[ClaimedJob], mode: Mode) -> None:
        """Put jobs back into their queues. If Redis does not answer, they wait for the next call."""
        self._waiting.extend(jobs)
        if not self._waiting:
            return
        released_jobs = self._release(self._waiting, mode)
        self._handle_released(released_jobs, mode)
        self._log.log(self.log_level, "gave back %d jobs", len(self._waiting))
        self._waiting.clear()

    def give_back_after_fault(self, fault: WorkerFault) -> None:
        """Put a job back after a fault of this worker."""
        mode: Mode = "fault" if fault.counts_against_job else "given_back"
        released_jobs = self._release([fault.claimed], mode)
        # JobSetAside inserts this text after "workers died while they ran this job".
        last_fault = f", or met a fault; the last fault was {fault}"
        self._handle_released(released_jobs, mode, last_fault)

    def take_up_abandoned(self, queue_names: Sequence[str], period_s: float) -> None:
        """Put back the jobs of dead workers. At most one worker looks for them in each period."""
        abandoned_jobs = self._store.find_abandoned(queue_names, period_s)
        released_jobs = self._release(abandoned_jobs, "abandoned")
        self._handle_released(released_jobs, "abandoned")

        ids_by_worker: dict[str, list[str]] = {}
        for job in released_jobs:
            if job.deaths and job.worker_name:
                ids_by_worker.setdefault(job.worker_name, []).append(job.job_id)
        self._store.record_deaths(ids_by_worker)

    def _release(self, held: Sequence[ClaimedJob], mode: Mode) -> list[ReleasedJob]:
        """Take jobs from their holders in one call; one by one if that call raises. Returns what became of each job."""

        def release(jobs: Sequence[ClaimedJob]) -> Sequence[ReleasedJob]:
            """Take jobs from their holders in one call."""
            return self._store.release(jobs, mode, self._max_deaths)

        return self._guard.batch(held, job_of=lambda claimed: claimed, call=release)

    def _handle_released(
        self, released: Sequence[ReleasedJob], mode: Mode, last_fault: str = ""
    ) -> None:
        """Log and count the released jobs, and end each one that this worker holds now.

        Such a job fails. If another worker had already written its end, only its dependents are queued.

        last_fault: text about the last fault, for the error of a job with which too many workers died.
        """

        def end(job: HeldJob) -> None:
            """End a job that no worker runs any more."""
            if job.claimed.has_ended:
                # Another worker has written and counted the end, so there is no outcome here.
                self._ends.queue_dependents(job, outcome=None)
                return
            job.replace_record(job.claimed.record.without_retries())
            self._ends.fail(job, JobSetAside(self._max_deaths, last_fault))

        self._log_takeovers(released, mode)
        for job in released:
            if job.deaths:
                self._tally.count_takeover(job.queue_name, job.deaths)
            if job.claimed is not None:  # this worker holds the job now, and has to end it
                with self._guard.around(job.claimed):
                    self._end_at_once(job.claimed, end)

    def _log_takeovers(self, released: Sequence[ReleasedJob], mode: Mode) -> None:
        """Log one warning for each worker whose jobs are taken over. If it has several jobs, also log each as DEBUG."""
        ids_by_group: dict[tuple[str, str, int], list[str]] = {}
        for job in released:
            if job.deaths:
                group = (job.queue_name, job.worker_name, job.deaths)
                ids_by_group.setdefault(group, []).append(job.job_id)

        for (queue_name, worker_name, deaths), job_ids in ids_by_group.items():
            holder = f"worker {worker_name}" if worker_name else _NOT_BEGUN
            facts = (holder, _REASONS[mode], deaths, self._max_deaths)
            has_many = len(job_ids) > 1
            if has_many:
                self._log.warning(
                    "%s: %d jobs are taken over from %s, %s: worker death %d; after %d they fail",
                    queue_name,
                    len(job_ids),
                    *facts,
                )
            level = logging.DEBUG if has_many else logging.WARNING
            for job_id in job_ids:
                self._log.log(
                    level,
                    "%s: job %s is taken over from %s, %s: worker death %d; after %d it fails",
                    queue_name,
                    job_id,
                    *facts,
                )
