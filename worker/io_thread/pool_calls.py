"""Makes the blocking calls of jobs in thread pools.

Calls have time limits. A call that needs memory waits in line for it. A call that met an outage is made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jobs.common.display import shown_error
from jobs.context import JobContext
from jobs.context.shared_files import NoRoomYet
from jobs.tasks import OpenTask, Task
from worker.errors import FileTimeout
from worker.io_thread.faults import is_fault
from worker.io_thread.held.held_jobs import SLOW_S, HeldJob
from worker.io_thread.held.job_guard import JobGuard
from worker.io_thread.held.packing import Packer
from worker.io_thread.held.streams import Inspections
from worker.io_thread.parts import Parts
from worker.logs import LastingTrouble
from worker.store.client import OUTAGES
from worker.threads.functions import FunctionPool
from worker.threads.interrupts import Call, as_class

TRY_AGAIN_S = 0.5
"""Seconds until a call is made again, after it found no memory or met an outage."""


class Place(NamedTuple):
    """A call's place in line. The smallest place comes first.

    opens: whether the call opens a file; False if it writes a part. Writing a part frees memory, so it comes before
    opening a file.
    job_number: the job's number. Among calls of one kind, the oldest job's call comes first.
    """

    opens: bool
    job_number: int


class WaitingCall(NamedTuple):
    """A call that waits in line.

    start: makes the call. If the job no longer waits for the call, `start` only ends it.
    is_awaited: whether the job still waits for the call.
    """

    start: Callable[[], None]
    is_awaited: Callable[[], bool]


class RoomLine:
    """The line of calls that take memory. Used by the I/O thread only.

    Once memory is short, only the first call in line is made, again and again until it succeeds. Otherwise calls that
    run at the same time could wait for ever, each for memory that another one holds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Monotonic seconds from which the first call in line is made again.
        self._again_at = clock()
        self._waiting: dict[Place, WaitingCall] = {}
        # The place of the call that is being retried. The calls behind it wait.
        self._retried: Place | None = None

    def begin(
        self, place: Place, start: Callable[[], None], is_awaited: Callable[[], bool]
    ) -> None:
        """Make a call now, or let it wait in line if a call with an earlier place waits or is being retried.

        start: makes the call if the job still waits for it; otherwise `start` only ends the call. is_awaited: whether
        the job still waits for the call. The next `try_again` ends each call for which no job waits.
        """
        is_behind_retried = self._retried is not None and self._retried < place
        is_behind_waiting = any(waiting_place < place for waiting_place in self._waiting)
        if is_behind_retried or is_behind_waiting:
            self._waiting[place] = WaitingCall(start, is_awaited)
        else:
            start()

    def make_again(
        self, place: Place, start: Callable[[], None], is_awaited: Callable[[], bool]
    ) -> None:
        """Let a call that found no memory wait in line, to be made again. Arguments: see `begin`."""
        self.note_over(place)
        self._waiting[place] = WaitingCall(start, is_awaited)
        self._again_at = self._clock() + TRY_AGAIN_S

    def note_over(self, place: Place) -> None:
        """Note that the call at this place is over, so that the next call may be made."""
        if self._retried == place:
            self._retried = None

    def try_again(self) -> None:
        """End the calls that no job waits for any more. If the pause is over, make the first of the remaining calls."""
        for place, call in list(self._waiting.items()):
            if not call.is_awaited():
                del self._waiting[place]
                call.start()  # nobody waits for the call, so `start` ends it without making it
        if self._waiting and self._retried is None and self._clock() >= self._again_at:
            self._retried = min(self._waiting)
            call = self._waiting.pop(self._retried)
            call.start()


Then = Callable[[HeldJob, Any, BaseException | None], None]
"""Takes a job and the value that its call returned, or None and the error that it raised."""


@dataclass(frozen=True)
class PoolCall:
    """A function for a pool, and what the I/O thread does when it has returned or raised.

    then: called unless the job was withdrawn meanwhile.
    on_return: called with the value, or with None after an error. It is called before `then`, and also if the job was
    withdrawn.
    is_ours: the function is our own. It checks for interrupts itself. It may be run again, so an outage only delays it.
    again_on: further errors after which the function is run again.
    discard: see FunctionPool.submit.
    place: the call's place in the RoomLine, if it takes memory.
    """

    function: Callable[[], Any]
    then: Then
    on_return: Callable[[HeldJob, Any], None] = lambda job, value: None
    is_ours: bool = False
    again_on: type[Exception] | tuple[()] = ()
    discard: Callable[[Any], None] | None = None
    place: Place | None = None


@dataclass(eq=False)
class _Submission:
    """A call that a job has submitted. It may be made several times.

    key: the call's key in the job, see HeldJob.await_call.
    thread_call: the pool's call of the latest attempt; None before the first attempt.
    """

    pool: FunctionPool
    job: HeldJob
    call: PoolCall
    key: object
    thread_call: Call | None = None

    def is_awaited(self) -> bool:
        """Whether the job still waits for this call."""
        return self.job.awaits(self.key)


class PoolCalls:
    """Runs the blocking calls of jobs in pools, for the I/O thread.

    on_withdrawn: called with a job that was withdrawn before its call returned.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        on_withdrawn: Callable[[HeldJob], None],
        guard: JobGuard,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._on_withdrawn = on_withdrawn
        self._guard = guard
        self._outage = LastingTrouble(log, "calls are carried out again", clock=clock)
        self._clock = clock
        # The calls that met an outage. They are made again at `_try_again_at`.
        self._delayed: list[_Submission] = []
        self._try_again_at = clock()
        self._line = RoomLine(clock)

    def submit(self, pool: FunctionPool, job: HeldJob, call: PoolCall) -> None:
        """Run a call's function in a pool. Its `on_return` and `then` are called in the I/O thread."""
        submission = _Submission(pool, job, call, key=job.await_call())
        if call.place is None:
            self._start(submission)
        else:
            # The call takes memory, so it waits while an earlier call in the line waits for memory.
            start = partial(self._start_if_awaited, submission)
            self._line.begin(call.place, start, submission.is_awaited)

    def _start(self, submission: _Submission) -> None:
        """Give the function to the pool."""
        job = submission.job
        call = submission.call

        def note_returned(value: Any, error: BaseException | None) -> None:
            """Note that the call has returned, and handle its outcome. Called in the I/O thread."""
            if job.call is submission.thread_call:  # by now the job may have made another call
                job.call = None
            if call.place is not None:
                self._line.note_over(call.place)
            with self._guard.around(job):
                self._handle_outcome(submission, value, error)

        def done(value: Any, error: BaseException | None) -> None:
            """Have the I/O thread call `note_returned`. Called in the pool's thread."""
            self._post(lambda: note_returned(value, error))

        submission.thread_call = submission.pool.submit(
            call.function, done, is_interruptible=not call.is_ours, discard=call.discard
        )
        job.call = submission.thread_call

    def _start_if_awaited(self, submission: _Submission) -> None:
        """Make a call that had to wait. If its job was withdrawn meanwhile, end the call without making it."""
        with self._guard.around(submission.job):
            if submission.is_awaited():
                self._start(submission)
            else:
                self._handle_outcome(submission, value=None, error=None)

    def _handle_outcome(
        self, submission: _Submission, value: Any, error: BaseException | None
    ) -> None:
        """Hand an outcome to the call's `on_return` and `then`, or have the call made again later."""
        job = submission.job
        call = submission.call
        if not submission.is_awaited():
            call.on_return(job, value)
            self._on_withdrawn(job)
        elif call.place is not None and isinstance(error, NoRoomYet):
            start = partial(self._start_if_awaited, submission)
            self._line.make_again(call.place, start, submission.is_awaited)
        elif error is not None and _is_repeated_after(error, call):
            self._delay(submission, error)
        else:
            call.on_return(job, value)
            call.then(job, value, error)

    def _delay(self, submission: _Submission, error: BaseException) -> None:
        """Have a call made again after a pause. error: why it was not carried out."""
        self._outage.note(
            type(error).__name__,
            "job %s: not carried out yet (%s); trying again",
            submission.job.claimed.job_id,
            shown_error(error),
        )
        if not self._delayed:
            self._try_again_at = self._clock() + TRY_AGAIN_S
        self._delayed.append(submission)

    def try_again(self) -> None:
        """Make the waiting calls whose pause is over: calls that found no memory, and calls that met an outage."""
        self._line.try_again()
        if not self._delayed:
            self._outage.note_absence()
        elif self._clock() >= self._try_again_at:
            due = self._delayed
            self._delayed = []
            for submission in due:
                self._start_if_awaited(submission)


def _is_repeated_after(error: BaseException, call: PoolCall) -> bool:
    """Whether a call is made again after this error."""
    is_outage = isinstance(error, OUTAGES) and not is_fault(error)
    return (call.is_ours and is_outage) or isinstance(error, call.again_on)


class PoolThreads:
    """All thread pools of a worker, except those of the engine's thread. Used by the I/O thread only."""

    def __init__(self, parts: Parts, files: TaskFiles, inspections: Inspections) -> None:
        self._webhooks = parts.callbacks.webhooks
        self._inspections = inspections
        # `close` waits for the threads of these pools.
        self._awaited_pools = (*files.pools, parts.functions, parts.enders)
        self._pools = (*self._awaited_pools, self._webhooks.pool)
        self._grace_s = parts.environment.function_grace_s
        self._log = parts.log

    @property
    def num_stuck(self) -> int:
        """The number of threads that were given up and still run."""
        return sum(pool.num_stuck for pool in self._pools)

    def give_up_stuck(self) -> None:
        """Give up the threads that ignore their interrupts, and log each."""
        threads_and_lines = []
        for pool in self._pools:
            threads_and_lines += pool.give_up_stuck(self._grace_s)
        for thread_and_line in threads_and_lines:
            self._log.error(
                "%s goes on %g s after its interrupt: given up, another thread takes its place (%d stuck)",
                thread_and_line,
                self._grace_s,
                self.num_stuck,
            )

    def close(self, timeout_s: float) -> None:
        """End the threads. Wait at most `timeout_s` seconds for files to be closed and for interrupted calls."""
        for pool in self._awaited_pools:
            pool.end()
        self._inspections.end()
        until = time.monotonic() + timeout_s
        for pool in self._awaited_pools:
            pool.join(max(0.0, until - time.monotonic()))
        self._webhooks.close()


THREADS = 2
"""The threads that open files. As many threads write and close files. Slow calls start more threads."""

MAX_OPENING = 6
"""The most files that a worker opens at the same time. Even if four of them hang, two others can be opened."""


class TaskFiles:
    """Makes the blocking calls of tasks. The I/O thread calls all public methods.

    limit_s: seconds without a sign of life after which opening a file, writing a part, closing a task or planning a run
    is interrupted. A whole call may take longer.
    """

    def __init__(
        self,
        packer: Packer,
        calls: PoolCalls,
        limit_s: float,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._packer = packer
        self._calls = calls
        self._limit_s = limit_s
        self._log = log
        self._openers = FunctionPool(THREADS, "tokenmill-files", clock)
        self._writers = FunctionPool(THREADS, "tokenmill-parts", clock)
        self.pools = self._openers, self._writers
        # These are classes, because only a class can be raised in another thread.
        self._open_timeout = as_class(FileTimeout("opening its file went on", limit_s))
        self._plan_timeout = as_class(
            FileTimeout("planning went on without a sign of life", limit_s)
        )
        self._write_timeout = as_class(
            FileTimeout("writing its part went on without a sign of life", limit_s)
        )

    def open(self, job: HeldJob, task: Task, context: JobContext, then: Then) -> None:
        """Open a task in a thread, note it as the job's `open_task`, and call `then`."""
        self._packer.note_opening(job)
        place = None
        if task.reads_rows:  # rows take memory, so the call waits in line for it
            place = Place(opens=True, job_number=job.number)
        call = PoolCall(
            function=lambda: task.open(context),
            then=then,
            on_return=self._opened,
            is_ours=True,
            discard=partial(self._close, job.claimed.job_id),
            place=place,
        )
        self._calls.submit(self._openers, job, call)

    def _opened(self, job: HeldJob, opened: OpenTask | None) -> None:
        """Note that the call which opens the file is over. opened: the open task; None if the call failed."""
        self._packer.note_opened(job)
        job.open_task = opened

    def finish(self, job: HeldJob, then: Then) -> None:
        """Make the result of a job's open task in a thread, and call `then` with the result."""
        self._packer.note_finishing(job)

        def on_return(job: HeldJob, _: Any) -> None:
            """Note that the call is over, whether or not the part was written."""
            self._packer.note_finished(job)

        call = PoolCall(
            function=lambda: _result_of(job),
            then=then,
            on_return=on_return,
            is_ours=True,
            place=Place(opens=False, job_number=job.number),
        )
        self._calls.submit(self._writers, job, call)

    def close(self, job_id: str, opened: OpenTask) -> None:
        """Have a thread close the task of a job that has ended."""
        self._writers.submit(
            partial(self._close, job_id, opened), lambda _, error: None, is_interruptible=False
        )

    def _close(self, job_id: str, opened: OpenTask) -> None:
        """Close a task. Called in a thread, also for a task that was opened only after its job had ended."""
        try:
            opened.close()
        except Exception as error:  # noqa: BLE001  # the job has ended
            self._log.error(
                "job %s: could not remove its temporary files: %s", job_id, shown_error(error)
            )

    def check(self) -> None:
        """Start more threads if calls are slow, and interrupt the calls that have been silent for too long."""
        for pool in self.pools:
            pool.relieve(SLOW_S, MAX_OPENING)
        self._openers.interrupt_silent(self._limit_s, self._open_timeout)
        self._writers.interrupt_silent(self._limit_s, self._write_timeout)

    def interrupt_silent(self, planning_job: HeldJob) -> None:
        """Interrupt a job that plans a run, if it has been silent for too long, whatever its timeout is."""
        call = planning_job.call
        if call is None:
            return
        is_interrupted = call.pending_interrupt is not None
        if not is_interrupted and call.silent_s > self._limit_s:
            planning_job.interrupt_function(self._plan_timeout)


def _result_of(job: HeldJob) -> Any:
    """Return the result of a job's task.

    The pool gets this function instead of the bound method `open_task.result`, because the method would keep a closed
    shard in memory.
    """
    assert job.open_task is not None
    return job.open_task.result()
