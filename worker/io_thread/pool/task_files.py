"""The files of tasks: opened, written and closed in threads of their own, each within a limit of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from jobs.context import JobContext
from jobs.tasks import OpenTask, Task
from worker.errors import file_timeout
from worker.io_thread.held.held_jobs import HeldJob
from worker.io_thread.held.packing import Packer
from worker.io_thread.pool.pool_calls import Place, PoolCall, PoolCalls, Then
from worker.threads.functions import FilePool, seconds_of_silence, seconds_since_begin

THREADS = 2
"""That open files, and that write and close them, while none is slow."""

MAX_OPENING = 6
"""Files that a worker opens at once: all but two of them may hang before it takes no further ones."""

SLOW_S = 2.0
"""A call that goes on so long holds up no other: it has a thread more, and its lane takes the next file."""


class TaskFiles:
    """Makes the blocking calls of tasks. All methods belong to the I/O thread.

    calls: brings their reports back. limit_s: seconds after which opening a file is over its time, and so are
    writing a part, closing a task and planning after as long without a sign of life: those may take long as a
    whole, whoever writes a run's last part looks into all the others.
    """

    def __init__(
        self,
        packer: Packer,
        calls: PoolCalls,
        limit_s: float,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._packer, self._calls, self._limit_s = packer, calls, limit_s
        self._log, self._clock = log, clock
        self._openers = FilePool(THREADS, MAX_OPENING, "tokenmill-files", clock)
        self._writers = FilePool(THREADS, MAX_OPENING, "tokenmill-parts", clock)
        self._not_open = file_timeout("opening its file went on", limit_s)
        self._not_planned = file_timeout("planning went on without a sign of life", limit_s)
        self._not_written = file_timeout("writing its part went on without a sign of life", limit_s)

    def open(self, job: HeldJob, task: Task, context: JobContext, then: Then) -> None:
        """Open a job's task, which becomes the job's `open_task`, then call `then`."""
        self._packer.opening(job)
        call = PoolCall(
            lambda: task.open(context),
            then,
            self._opened,
            is_ours=True,
            discard=lambda opened: self._close_unawaited(job.claimed.job_id, opened),
            place=Place(opens=True, job_number=job.number) if task.reads_rows else None,
        )
        self._calls.submit(self._openers, job, call)

    def _opened(self, job: HeldJob, opened: OpenTask | None) -> None:
        self._packer.opened(job)
        job.open_task = opened

    def finish(self, job: HeldJob, then: Then) -> None:
        """Ask a job's open task for its result, then call `then` with it."""
        self._packer.finishing(job)
        place = Place(opens=False, job_number=job.number)
        call = PoolCall(lambda: _result_of(job), then, self._finished, is_ours=True, place=place)
        self._calls.submit(self._writers, job, call)

    def _finished(self, job: HeldJob, value: Any) -> None:
        self._packer.finished(job)

    def close(self, job_id: str, opened: OpenTask) -> None:
        """Close what was open for a job that has ended."""

        def closed(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self._log.error("job %s: could not remove its temporary files: %s", job_id, error)

        self._writers.submit(opened.close, closed, raises=False)

    def _close_unawaited(self, job_id: str, opened: OpenTask) -> None:
        """Close what was opened after its job had ended; called in the thread that was given up."""
        try:
            opened.close()
        except OSError as error:
            self._log.error("job %s: could not remove its temporary files: %s", job_id, error)

    def check(self) -> None:
        """See to the calls that are slow, and interrupt those that are over their limit."""
        moment = self._clock()
        for job in self._packer.opening_now():
            if job.call is not None and seconds_since_begin(job.call, moment) > SLOW_S:
                self._packer.opens_slowly(job)
        for pool in (self._openers, self._writers):
            pool.relieve(SLOW_S)
        self._openers.interrupt_overdue(seconds_since_begin, self._limit_s, self._not_open)
        self._writers.interrupt_overdue(seconds_of_silence, self._limit_s, self._not_written)

    def interrupt_silent(self, planning: HeldJob) -> None:
        """Interrupt a planning that gives no sign of life, whatever the job's own timeout."""
        call = planning.call
        if (
            call is not None
            and call.error is None
            and seconds_of_silence(call, self._clock()) > self._limit_s
        ):
            planning.interrupt_function(self._not_planned)

    def give_up_stuck(self, grace_s: float) -> list[str]:
        """See FunctionPool.give_up_stuck."""
        return self._openers.give_up_stuck(grace_s) + self._writers.give_up_stuck(grace_s)

    @property
    def num_stuck(self) -> int:
        """Threads that were given up and have not ended."""
        return self._openers.num_stuck + self._writers.num_stuck

    def end(self) -> None:
        """Let the threads end once the calls given so far are done."""
        self._openers.end()
        self._writers.end()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, but for stuck ones, at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        for pool in (self._openers, self._writers):
            pool.join(max(0.0, until - time.monotonic()))


def _result_of(job: HeldJob) -> Any:
    """Of a call nothing may be left but the job: the callbacks refer to each other, and would keep a closed
    shard for the collector."""
    assert job.open_task is not None
    return job.open_task.result()
