"""RoomLine: who waits for memory, in the order in which it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

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
