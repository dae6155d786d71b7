"""Turns at what one thread at a time may use. Waiting for a turn is no silence while its holder shows life."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

#: Seconds between two looks of a waiting thread at the one that holds the turn.
LOOK_S = 0.2


class Caller(Protocol):
    """A call that can be interrupted, and that is interrupted once it shows no life for long."""

    def wait_for(self, holder: Any) -> None:
        """Raise the interrupt, if any; else show as much life as the caller that holds the turn (None: unknown)."""


def nobody() -> None:
    """Stand in for the caller where calls are not watched."""


class Turns:
    """Gives each thread its turn at a key. Thread-safe. current_call: returns the caller that a thread works for."""

    def __init__(self, current_call: Callable[[], Caller | None] = nobody) -> None:
        self._current_call = current_call
        self._lock = threading.Lock()
        self._turns = WeakValueDictionary[Hashable, _Turn]()  # while somebody has or awaits them

    def __len__(self) -> int:
        return len(self._turns)

    @contextmanager
    def at(self, key: Hashable) -> Iterator[None]:
        """Wait for the turn and hold it. Raises the waiting call's interrupt."""
        caller = self._current_call()
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
        while not turn.lock.acquire(timeout=LOOK_S):
            if caller is not None:
                caller.wait_for(turn.holder)
        turn.holder = caller
        try:
            yield
        finally:
            turn.holder = None
            turn.lock.release()


class _Turn:
    """Is held by one thread at a time. holder: the caller that this thread works for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: Caller | None = None
