"""Writes to each held job's journal what the job has computed. The job's next execution goes on from the journal."""

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue

from jobs.common.display import shown_error
from worker.engine_thread.orders import Order, ReportTokens, SampledTokens
from worker.io_thread.held.held_jobs import HeldJob, HeldJobs, JobState
from worker.io_thread.held.job_guard import JobGuard
from worker.logs import LastingTrouble
from worker.threads.functions import FunctionPool

THREADS = 2
"""Threads that write journals. An object store that does not answer blocks one thread."""

STEP_S = 4.0
"""Seconds that a leaving worker waits for the engine to finish its step."""

LEAVE_S = 1.0
"""Seconds that a leaving worker waits after that step until its last entries are written."""

_STATES_WITH_JOURNAL = (JobState.STREAMING, JobState.SENT, JobState.COLLECTING)


class Journals:
    """Writes the journals of jobs whose requests are in the engine. Used by the I/O thread only.

    A job's journal keeps what the job has computed, for the job's next execution.
    period_s: seconds between two entries of a job; 0 for no journals. post: queues a call for the I/O thread.
    """

    def __init__(
        self,
        jobs: HeldJobs,
        guard: JobGuard,
        period_s: float,
        orders: SimpleQueue[Order],
        post: Callable[[Callable[[], None]], None],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._guard = guard
        self._period_s = period_s
        self._orders = orders
        self._post = post
        self._trouble = LastingTrouble(log, "journals are written again", logging.WARNING)
        self._clock = clock
        self._due_at = clock() + period_s
        # Monotonic seconds until which a leaving worker waits for entries; None while the worker does not leave.
        self._leave_by: float | None = None
        # The number of ReportTokens orders that the engine has not answered yet.
        self._num_unanswered = 0
        # The jobs whose entries are being written, by number. Each has the last report that came meanwhile, or None.
        self._writing: dict[int, SampledTokens | None] = {}
        self.pool = FunctionPool(THREADS, "tokenmill-journals") if period_s else None

    def ask_if_due(self, moment: float) -> None:
        """Once in `period_s` seconds, ask the engine for the tokens that it has sampled so far."""
        if self.pool is None or self._leave_by is not None:
            return
        if moment < self._due_at or self._num_unanswered > 0:
            return
        self._due_at = moment + self._period_s
        if self._jobs_with_journal():
            self._num_unanswered += 1
            self._orders.put(ReportTokens())

    def leave(self, moment: float) -> None:
        """Stop the engine, and have the last entries written. moment: the time now, in monotonic seconds."""
        if self.pool is not None and self._leave_by is None and self._jobs_with_journal():
            self._leave_by = moment + STEP_S
            self._num_unanswered += 1
            self._orders.put(ReportTokens(stops=True))

    def are_awaited(self, moment: float) -> bool:
        """Whether a leaving worker must wait for entries before its jobs are given back."""
        if self._leave_by is None or moment >= self._leave_by:
            return False
        return self._num_unanswered > 0 or bool(self._writing)

    def write(self, report: SampledTokens) -> None:
        """Have each job write an entry with the tokens that the engine reports."""
        self._num_unanswered -= 1
        moment = self._clock()
        if self._leave_by is not None and not self._num_unanswered:
            # The engine has finished its step. From now on the worker waits only for its entries.
            self._leave_by = moment + LEAVE_S
        for job in self._jobs_with_journal():
            assert job.began_clock_s is not None  # a job with a journal has begun
            is_young = moment - job.began_clock_s < self._period_s
            is_young_prompt = is_young and not job.is_file
            if is_young_prompt and self._leave_by is None:
                continue  # most prompts end before their first entry
            if job.number in self._writing:
                # An entry is being written. This report is for the next entry.
                self._writing[job.number] = report
                continue
            with self._guard.around(job):
                self._write_entry(job, report)

    def _jobs_with_journal(self) -> list[HeldJob]:
        """Return the jobs whose state a journal can keep."""
        jobs = []
        for job in self._jobs:
            runs_task = job.has_begun and job.open_task is not None
            if runs_task and job.state in _STATES_WITH_JOURNAL:
                jobs.append(job)
        return jobs

    def _write_entry(self, job: HeldJob, report: SampledTokens) -> None:
        """Have a thread write a job's entry."""
        assert self.pool is not None
        assert job.open_task is not None
        write = job.open_task.keep(job.undelivered_tokens(report.samples))
        if write is None:  # the task has nothing new for its journal
            return
        self._writing[job.number] = None  # no report has come for the next entry yet

        def done(_: object, error: BaseException | None) -> None:
            """Have the I/O thread call `_note_written`. Called in the pool's thread."""
            self._post(lambda: self._guard.call(job, self._note_written, job, error))

        self.pool.submit(write, done, is_interruptible=False)

    def _note_written(self, job: HeldJob, error: BaseException | None) -> None:
        """Note that an entry is written, or log its error. If a report came meanwhile, write the next entry."""
        next_report = self._writing.pop(job.number)
        if error is None:
            self._trouble.note_absence()
        else:
            self._trouble.note(
                type(error).__name__,
                "job %s: its journal could not be written: %s",
                job.claimed.job_id,
                shown_error(error),
            )
        if next_report is not None and job in self._jobs_with_journal():
            self._write_entry(job, next_report)
