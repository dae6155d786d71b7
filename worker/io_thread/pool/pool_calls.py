"""Calls that this worker makes in threads for its jobs, and makes again when Redis comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs.context.shard_bytes import NoRoomYet
from worker.io_thread.faults import is_fault
from worker.io_thread.held.held_jobs import HeldJob
from worker.store.client import OUTAGES
from worker.threads.functions import FunctionPool

TRY_AGAIN_S = 0.5
"""Pause before a call that found no memory is made again."""


class Place(NamedTuple):
    """Where a call stands. Parts that are written come before files that are opened, since that gives memory
    back; then the job that was claimed first."""

    opens: bool
    job_number: int


class RoomLine:
    """Calls that take memory. Once it is short, the first of the line alone is tried until it gets through.

    Calls that run at once may each hold what the other waits for, let go, and begin again together, for ever.
    The first in line waits only for calls that began before it was, which end. The I/O thread's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._again_at = clock, clock()
        self._waiting: dict[Place, tuple[Callable[[], None], Callable[[], bool]]] = {}
        self._tried: Place | None = None

    def begin(self, place: Place, start: Callable[[], None], is_awaited: Callable[[], bool]) -> None:
        """Make a call now, or once those before it in line have got through.

        start: makes it. is_awaited: whether anybody still waits for it; where nobody does, `start` comes at
        once.
        """
        if any(each < place for each in self._waiting) or (self._tried is not None and self._tried < place):
            self._waiting[place] = start, is_awaited
        else:
            start()

    def wait(self, place: Place, start: Callable[[], None], is_awaited: Callable[[], bool]) -> None:
        """Make a call again that has found no room. As `begin`."""
        self.came_back(place)
        self._waiting[place] = start, is_awaited
        self._again_at = self._clock() + TRY_AGAIN_S

    def came_back(self, place: Place) -> None:
        """A call is over."""
        if self._tried == place:
            self._tried = None

    def try_again(self) -> None:
        """Make the first call of those that wait, once its pause is over."""
        for place, (start, is_awaited) in list(self._waiting.items()):
            if not is_awaited():
                del self._waiting[place]
                start()
        if self._waiting and self._tried is None and self._clock() >= self._again_at:
            self._tried = min(self._waiting)
            self._waiting.pop(self._tried)[0]()


Then = Callable[[HeldJob, Any, BaseException | None], None]
"""Takes the value that a call came back with, or what it raised."""

_TRY_AGAIN_S = 0.5
"""Pause before what an outage cut off is tried again."""


@dataclass(frozen=True)
class PoolCall:
    """A function for a pool, and what the I/O thread does when it came back.

    then: follows unless the job was withdrawn. came_back: is called before it in any case, with the value, or
    None where the function raised. is_ours: the function is our own, which asks whether it is interrupted,
    and may be run again after any step of it: an outage delays it only. discard: see FunctionPool.submit.
    place: of a function of ours that takes memory, which shards that hold too much of it delay.
    """

    function: Callable[[], Any]
    then: Then
    came_back: Callable[[HeldJob, Any], None] = lambda job, value: None
    is_ours: bool = False
    discard: Callable[[Any], None] | None = None
    place: Place | None = None


class PoolCalls:
    """Runs a job's blocking parts in pools and brings their reports to the I/O thread, which owns it.

    post: queues a call for the I/O thread. unawaited: takes a job whose call came back after the job was
    withdrawn.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        unawaited: Callable[[HeldJob], None],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post, self._unawaited, self._log, self._clock = post, unawaited, log, clock
        self._waiting: list[Callable[[], None]] = []
        self._try_again_at = clock()
        self._line = RoomLine(clock)

    def submit(self, pool: FunctionPool, job: HeldJob, call: PoolCall) -> None:
        """Run a function in a pool; what follows runs here."""
        place, is_ours = call.place, call.is_ours
        awaited = job.await_call()

        def start() -> None:
            job.call = pool.submit(
                call.function,
                lambda value, error: self._post(lambda: report(value, error)),
                not is_ours,
                call.discard,
            )

        def start_again() -> None:
            if job.awaits(awaited):
                start()
            else:
                report(None, None)

        def report(value: Any, error: BaseException | None) -> None:
            if place is not None:
                self._line.came_back(place)
            if not job.awaits(awaited):
                call.came_back(job, value)
                self._unawaited(job)
                return
            job.call = None
            if place is not None and isinstance(error, NoRoomYet):
                self._line.wait(place, start_again, is_awaited)
            elif is_ours and isinstance(error, OUTAGES) and not is_fault(error):
                self._log.error("job %s: Redis did not answer (%s); trying again", job.claimed.job_id, error)
                self.submit_later(start_again)
            else:
                call.came_back(job, value)
                call.then(job, value, error)

        def is_awaited() -> bool:
            return job.awaits(awaited)

        if place is None:
            start()
        else:
            self._line.begin(place, start_again, is_awaited)

    def submit_later(self, submit: Callable[[], None]) -> None:
        """Try something again when Redis is there, and not at once."""
        if not self._waiting:
            self._try_again_at = self._clock() + _TRY_AGAIN_S
        self._waiting.append(submit)

    def try_again(self) -> None:
        """Start what waits, once its pause is over."""
        self._line.try_again()
        if self._waiting and self._clock() >= self._try_again_at:
            again, self._waiting = self._waiting, []
            for submit in again:
                submit()
