"""Health: whether a worker lives, and whether it is ready for jobs."""

import time
from collections.abc import Callable
from typing import Protocol

LIVE_S = 180.0
"""Seconds after which a thread counts as hanging if its loop makes no turn. The longest steps on a CPU take less."""

REACHED_S = 15.0
"""Seconds for which Redis counts as reachable after the I/O thread's last turn without an error of Redis."""


class WatchedEngine(Protocol):
    """What Health needs of the main thread's loop. last_turn_at: monotonic seconds when its last turn began."""

    last_turn_at: float


class WatchedIo(WatchedEngine, Protocol):
    """What Health needs of the I/O thread.

    redis_ok_at: monotonic seconds when all of the thread's duties in Redis last succeeded; None if they never have.
    """

    redis_ok_at: float | None

    @property
    def why_not_claiming(self) -> str | None:
        """Why the worker claims no jobs; None if it claims jobs."""

    @property
    def warning(self) -> str:
        """A problem that does not keep the worker from claiming jobs; empty if there is none."""


class Health:
    """Says why a worker is unhealthy. The texts are empty for a healthy worker. Any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engine: WatchedEngine | None = None
        self._io: WatchedIo | None = None

    def watch(self, engine: WatchedEngine, io: WatchedIo) -> None:
        """Watch these two loops from now on. Called when the model is loaded."""
        self._engine = engine
        self._io = io

    def why_dead(self) -> str:
        """Say why the worker must be restarted; empty if it is alive. While the model loads, the worker is alive."""
        if self._engine is None or self._io is None:
            return ""
        for name, loop in (("engine", self._engine), ("I/O", self._io)):
            silent_s = self._clock() - loop.last_turn_at
            if silent_s > LIVE_S:
                return f"the {name} thread hangs: its loop has made no turn for {silent_s:.0f} s"
        return ""

    def why_not_ready(self) -> str:
        """Say why the worker takes no jobs now; empty if it takes jobs."""
        if self._io is None:
            return "the model is not loaded yet"
        if self._io.redis_ok_at is None:
            return "Redis has not answered yet"
        silent_s = self._clock() - self._io.redis_ok_at
        if silent_s > REACHED_S:
            return f"Redis has taken nothing for {silent_s:.0f} s: it does not answer, or is full"
        why_dead = self.why_dead()
        if why_dead:
            return why_dead
        return self._io.why_not_claiming or ""

    def warning(self) -> str:
        """Say what a person should mend even though the worker takes jobs; empty if nothing is wrong."""
        return "" if self._io is None else self._io.warning
