"""Makes the blocking calls of jobs in thread pools: with time limits, in line for memory, and again after an outage."""

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
"""Seconds until a call is made again after it found no memory or was cut off by an outage."""


class Place(NamedTuple):
    """A call's place in line.

    Writing a part frees memory, so it comes before opening a file. Within each kind, the oldest job comes first.
    """

    opens: bool
    job_number: int


class WaitingCall(NamedTuple):
    """A call that waits in line. start: makes it. is_awaited: whether its job still waits for it."""

    start: Callable[[], None]
    is_awaited: Callable[[], bool]


class RoomLine:
    """The line of calls that take memory. Once memory is short, only the first call is tried until it succeeds.

    Otherwise calls that run at the same time could wait for ever, each for memory that another one holds. Used by the
    I/O thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._again_at = clock()
        self._waiting: dict[Place, WaitingCall] = {}
        # The call that is made again at present, while the calls behind it wait.
        self._tried: Place | None = None

    def begin(
        self, place: Place, start: Callable[[], None], is_awaited: Callable[[], bool]
    ) -> None:
        """Make a call now. If earlier calls wait, make it in its turn.

        start: makes the call. is_awaited: whether its job still waits for it. If its job has been stopped, the next
        `try_again` makes the call at once, so that it sees this and ends.
        """
        is_behind_a_try = self._tried is not None and self._tried < place
        is_behind_others = any(earlier_place < place for earlier_place in self._waiting)
        if is_behind_a_try or is_behind_others:
            self._waiting[place] = WaitingCall(start, is_awaited)
        else:
            start()

    def wait(self, place: Place, start: Callable[[], None], is_awaited: Callable[[], bool]) -> None:
        """Make a call again, in its turn, after it found no room. Arguments: see `begin`."""
        self.came_back(place)
        self._waiting[place] = WaitingCall(start, is_awaited)
        self._again_at = self._clock() + TRY_AGAIN_S

    def came_back(self, place: Place) -> None:
        """Note that the call at this place is over, so that the next one may be tried."""
        if self._tried == place:
            self._tried = None

    def try_again(self) -> None:
        """Make the calls that nobody awaits any more. If the pause is over, make the first other call too."""
        for place, call in list(self._waiting.items()):
            if not call.is_awaited():
                del self._waiting[place]
                call.start()
        if self._waiting and self._tried is None and self._clock() >= self._again_at:
            self._tried = min(self._waiting)
            call = self._waiting.pop(self._tried)
            call.start()


Then = Callable[[HeldJob, Any, BaseException | None], None]
"""Takes a job and the value that its call returned, or None and the error that it raised."""


@dataclass(frozen=True)
class PoolCall:
    """A function for a pool, and what the I/O thread does when it has returned or raised.

    then: called unless the job was withdrawn meanwhile.
    came_back: called before `then`, and also if the job was withdrawn; with the value, or None after an error.
    is_ours: our own function. It asks whether it is interrupted. It may be run again, so an outage only delays it.
    again_on: further errors after which the function is run again.
    discard: see FunctionPool.submit.
    place: its place in the RoomLine, if it takes memory.
    """

    function: Callable[[], Any]
    then: Then
    came_back: Callable[[HeldJob, Any], None] = lambda job, value: None
    is_ours: bool = False
    again_on: type[Exception] | tuple[()] = ()
    discard: Callable[[Any], None] | None = None
    place: Place | None = None


class PoolCalls:
    """Runs the blocking calls of jobs in pools, for the I/O thread.

    unawaited: called with a job that was withdrawn before its call came back.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        unawaited: Callable[[HeldJob], None],
        guard: JobGuard,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._unawaited = unawaited
        self._guard = guard
        self._delays = LastingTrouble(log, "calls are carried out again", clock=clock)
        self._clock = clock
        # Starts the calls that an outage has cut off, once `_try_again_at` has come.
        self._waiting: list[Callable[[], None]] = []
        self._try_again_at = clock()
        self._line = RoomLine(clock)

    def submit(self, pool: FunctionPool, job: HeldJob, call: PoolCall) -> None:
        """Run a function in a pool. Its `came_back` and `then` are called in the I/O thread."""
        place = call.place
        is_ours = call.is_ours
        # What `start` has given to the pool. The job may make another call by the time this one comes back.
        started: list[Call] = []
        call_key = job.await_call()

        def post(value: Any, error: BaseException | None) -> None:
            """Pass the outcome on to the I/O thread. Called in the pool's thread."""
            self._post(lambda: report(value, error))

        def start() -> None:
            """Give the function to the pool."""
            job.call = pool.submit(
                call.function, post, is_interruptible=not is_ours, discard=call.discard
            )
            started.append(job.call)

        def start_again() -> None:
            """Start the call that was delayed, unless its job was let go meanwhile."""
            with self._guard.around(job):
                if job.awaits(call_key):
                    start()
                else:  # it ends without having been made
                    look_at(value=None, error=None)

        def report(value: Any, error: BaseException | None) -> None:
            """Free the call's place, then look at its outcome."""
            if job.call in started:
                job.call = None
            if place is not None:
                self._line.came_back(place)
            with self._guard.around(job):
                look_at(value, error)

        def look_at(value: Any, error: BaseException | None) -> None:
            """Hand the outcome to `then`, or let the call wait for another try."""
            if not job.awaits(call_key):
                call.came_back(job, value)
                self._unawaited(job)
                return
            is_outage = is_ours and isinstance(error, OUTAGES) and not is_fault(error)
            is_to_be_repeated = is_outage or isinstance(error, call.again_on)
            if place is not None and isinstance(error, NoRoomYet):
                self._line.wait(place, start_again, is_awaited)
            elif error is not None and is_to_be_repeated:
                self._delays.note(
                    type(error).__name__,
                    "job %s: not carried out yet (%s); trying again",
                    job.claimed.job_id,
                    shown_error(error),
                )
                if not self._waiting:
                    self._try_again_at = self._clock() + TRY_AGAIN_S
                self._waiting.append(start_again)
            else:
                call.came_back(job, value)
                call.then(job, value, error)

        def is_awaited() -> bool:
            """Whether the job still waits for this call."""
            return job.awaits(call_key)

        if place is None:
            start()
        else:
            self._line.begin(place, start_again, is_awaited)

    def try_again(self) -> None:
        """Start the waiting calls, once their pause is over."""
        self._line.try_again()
        if not self._waiting:
            self._delays.note_absence()
        elif self._clock() >= self._try_again_at:
            due = self._waiting
            self._waiting = []
            for start in due:
                start()


class PoolThreads:
    """All thread pools of a worker, except those of the engine's thread. Used by the I/O thread only."""

    def __init__(self, parts: Parts, files: TaskFiles, inspections: Inspections) -> None:
        self._webhooks = parts.callbacks.webhooks
        self._inspections = inspections
        self._awaited_pools = (*files.pools, parts.functions, parts.enders)
        self._pools = (*self._awaited_pools, self._webhooks.pool)
        self._grace_s = parts.environment.function_grace_s
        self._log = parts.log

    @property
    def num_stuck(self) -> int:
        """The number of threads that were given up and still run, because their code cannot be interrupted."""
        return sum(pool.num_stuck for pool in self._pools)

    def give_up_stuck(self) -> None:
        """Give up the threads that ignore their interrupts."""
        places = []
        for pool in self._pools:
            places += pool.give_up_stuck(self._grace_s)
        for place in places:
            self._log.error(
                "%s goes on %g s after its interrupt: given up, another thread takes its place (%d stuck)",
                place,
                self._grace_s,
                self.num_stuck,
            )

    def close(self, timeout_s: float) -> None:
        """End the threads. Wait at most `timeout_s` for files to be closed and for interrupted calls."""
        for pool in self._awaited_pools:
            pool.end()
        self._inspections.end()
        until = time.monotonic() + timeout_s
        for pool in self._awaited_pools:
            pool.join(max(0.0, until - time.monotonic()))
        self._webhooks.close()


THREADS = 2
"""The number of threads that open files, and of those that write and close files. Slow calls start more threads."""

MAX_OPENING = 6
"""Files that a worker opens at once. Four of them may hang while the other two go on."""


class TaskFiles:
    """Makes the blocking calls of tasks. All methods belong to the I/O thread.

    limit_s: seconds without a sign of life after which opening a file, writing a part, closing a task or planning is
    interrupted. A whole call may take longer.
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
        self._not_open = as_class(FileTimeout("opening its file went on", limit_s))
        self._not_planned = as_class(
            FileTimeout("planning went on without a sign of life", limit_s)
        )
        self._not_written = as_class(
            FileTimeout("writing its part went on without a sign of life", limit_s)
        )

    def open(self, job: HeldJob, task: Task, context: JobContext, then: Then) -> None:
        """Open a job's task, note it as the job's `open_task`, then call `then`."""
        self._packer.opening(job)
        place = None
        if task.reads_rows:
            place = Place(opens=True, job_number=job.number)
        call = PoolCall(
            function=lambda: task.open(context),
            then=then,
            came_back=self._opened,
            is_ours=True,
            discard=partial(self._close, job.claimed.job_id),
            place=place,
        )
        self._calls.submit(self._openers, job, call)

    def _opened(self, job: HeldJob, opened: OpenTask | None) -> None:
        """Note that the file is open, and its task; None if it could not be opened."""
        self._packer.opened(job)
        job.open_task = opened

    def finish(self, job: HeldJob, then: Then) -> None:
        """Ask a job's open task for its result, then call `then` with it."""
        self._packer.finishing(job)
        call = PoolCall(
            function=lambda: _result_of(job),
            then=then,
            came_back=lambda job, value: self._packer.finished(job),
            is_ours=True,
            place=Place(opens=False, job_number=job.number),
        )
        self._calls.submit(self._writers, job, call)

    def close(self, job_id: str, opened: OpenTask) -> None:
        """Close the open files of a job that has ended."""
        self._writers.submit(
            partial(self._close, job_id, opened), lambda _, error: None, is_interruptible=False
        )

    def _close(self, job_id: str, opened: OpenTask) -> None:
        """Close a task, in a thread. The task may have been opened after its job ended."""
        try:
            opened.close()
        except Exception as error:  # noqa: BLE001  # the job has ended
            self._log.error(
                "job %s: could not remove its temporary files: %s", job_id, shown_error(error)
            )

    def check(self) -> None:
        """Replace the threads of slow calls, and interrupt the calls over their limit."""
        for pool in self.pools:
            pool.relieve(SLOW_S, MAX_OPENING)
        self._openers.interrupt_silent(self._limit_s, self._not_open)
        self._writers.interrupt_silent(self._limit_s, self._not_written)

    def interrupt_silent(self, planning: HeldJob) -> None:
        """Interrupt a job that plans a run and gives no sign of life. The job's own timeout does not matter."""
        call = planning.call
        if call is not None and call.error is None and call.silent_s > self._limit_s:
            planning.interrupt_function(self._not_planned)


def _result_of(job: HeldJob) -> Any:
    """Return the result of a job's task. Holding `open_task.result` in a call would keep a closed shard in memory."""
    assert job.open_task is not None
    return job.open_task.result()
