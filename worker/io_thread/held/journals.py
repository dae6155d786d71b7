"""Has held jobs write down what they have computed, so that whoever takes one up next goes on from there."""

import logging
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from jobs.common.display import shown_error
from worker.engine_thread.orders import Order, SoFar, Tell
from worker.io_thread.held.held_jobs import HeldJob, HeldJobs, JobState
from worker.io_thread.held.job_guard import JobGuard
from worker.threads.functions import FunctionPool

THREADS = 2
"""That write journals; a store that does not answer takes one of them."""

STEP_S, LEAVE_S = 4.0, 1.0
"""How long a worker that leaves waits for the engine's step, which it has to anyway, and then for its journals."""


_STATES = (JobState.STREAMING, JobState.SENT, JobState.COLLECTING)


class Journals:
    """The journals of the jobs that stream. All methods belong to the I/O thread, to which `post` queues calls.

    period_s: between two entries; 0 for none.
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
        self._jobs, self._guard, self._period_s = jobs, guard, period_s
        self._orders, self._post = orders, post
        self._log, self._clock = log, clock
        self._due_at = clock() + period_s
        self._leave_by: float | None = None
        self._num_asked = 0
        self._writing: dict[int, SoFar | None] = {}  # what has been told meanwhile
        self.pool = FunctionPool(THREADS, "tokenmill-journals") if period_s else None

    def look(self, moment: float) -> None:
        """Ask the engine for the tokens so far, once a period is over."""
        if self.pool is None or self._leave_by is not None or moment < self._due_at or self._num_asked:
            return
        self._due_at = moment + self._period_s
        if self._streaming():
            self._num_asked += 1
            self._orders.put(Tell())

    def leave(self, moment: float) -> None:
        """Stop the engine, and have the last entries written."""
        if self.pool is not None and self._leave_by is None and self._streaming():
            self._leave_by = moment + STEP_S
            self._num_asked += 1
            self._orders.put(Tell(stops=True))

    def is_awaited(self, moment: float) -> bool:
        """Whether a worker that leaves has entries to write before its jobs are given back."""
        return self._leave_by is not None and moment < self._leave_by and (self._num_asked > 0 or bool(self._writing))

    def told(self, so_far: SoFar) -> None:
        """Take what the engine tells; have each job write its entry."""
        self._num_asked -= 1
        moment = self._clock()
        if self._leave_by is not None and not self._num_asked:
            self._leave_by = moment + LEAVE_S
        for job in self._streaming():
            if self._leave_by is None and not job.is_file and moment - (job.started_at or moment) < self._period_s:
                continue  # most prompts end before
            if job.number in self._writing:
                self._writing[job.number] = so_far
                continue
            with self._guard.around(job):
                self._enter(job, so_far)

    def _streaming(self) -> list[HeldJob]:
        return [job for job in self._jobs if job.has_begun and job.open_task is not None and job.state in _STATES]

    def _enter(self, job: HeldJob, so_far: SoFar) -> None:
        assert self.pool is not None
        assert job.open_task is not None
        write = job.open_task.keep(job.so_far(so_far.samples))
        if write is not None:
            self._writing[job.number] = None
            written = partial(self._guard.call, job, self._written, job)
            self.pool.submit(write, lambda _, error: self._post(partial(written, error)), raises=False)

    def _written(self, job: HeldJob, error: BaseException | None) -> None:
        later = self._writing.pop(job.number)
        if error is not None:
            reason = shown_error(error)
            self._log.warning("job %s: its journal could not be written: %s", job.claimed.job_id, reason)
        if later is not None and job in self._streaming():
            self._enter(job, later)
