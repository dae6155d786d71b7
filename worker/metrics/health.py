"""Whether a worker lives, and whether it is ready for jobs."""

import time
from collections.abc import Callable
from typing import Protocol

LIVE_S = 180.0
"""A thread that has not turned for so long hangs: the longest steps, of a large model on a CPU, take less."""
REACHED_S = 15.0
"""Redis counts as reachable for so long after the I/O thread's last turn without an error of it."""


class WatchedEngine(Protocol):
    """The main thread's loop, as health sees it. turned_at: monotonic seconds."""

    turned_at: float


class WatchedIo(WatchedEngine, Protocol):
    """The I/O thread, as health sees it. redis_at: when all its duties last came through; None before."""

    redis_at: float | None

    @property
    def why_not_claiming(self) -> str | None: ...
    @property
    def warning(self) -> str: ...


class Health:
    """Says why a worker is unhealthy; an empty text if it is not. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loops: tuple[WatchedEngine, WatchedIo] | None = None

    def serve(self, engine: WatchedEngine, io: WatchedIo) -> None:
        """Watch these two loops, now that the model is loaded."""
        self._loops = engine, io

    def why_dead(self) -> str:
        """Say why only a new start helps; a worker that still loads its model lives."""
        if self._loops is None:
            return ""
        for name, loop in zip(("engine", "I/O"), self._loops, strict=True):
            silent_s = self._clock() - loop.turned_at
            if silent_s > LIVE_S:
                return f"the {name} thread has not turned for {silent_s:.0f} s"
        return ""

    def why_not_ready(self) -> str:
        """Say why it takes no jobs now."""
        if self._loops is None:
            return "the model is not loaded yet"
        _, io = self._loops
        if io.redis_at is None:
            return "Redis has not answered yet"
        silent_s = self._clock() - io.redis_at
        if silent_s > REACHED_S:
            return f"Redis has not answered for {silent_s:.0f} s"
        return self.why_dead() or io.why_not_claiming or ""

    def warning(self) -> str:
        """Say what a person should mend although the worker takes jobs; empty if nothing is wrong."""
        return "" if self._loops is None else self._loops[1].warning
