"""Turns: lets one thread at a time use a thing. A waiting thread counts as alive as long as the holder does."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

#: Seconds between two looks of a waiting thread at the holder of the turn.
LOOK_S = 0.2


class Caller(Protocol):
    """A call that can be interrupted. It is interrupted if it shows no sign of life for long."""

    def wait_for(self, holder: Any) -> None:
        """Raise the call's interrupt if it has one; else count the holder's last sign of life as a sign of this call.

        holder: the call that has the turn; None if unknown.
        """


def nobody() -> None:
    """Return None: for places where calls are not watched."""


class Turns:
    """Gives each thread its turn at a key. Thread-safe.

    current_call: returns the caller whose call the current thread carries out; None if calls are not watched.
    """

    def __init__(self, current_call: Callable[[], Caller | None] = nobody) -> None:
        self._current_call = current_call
        self._lock = threading.Lock()
        # A turn stays while a thread holds it or waits for it.
        self._turns = WeakValueDictionary[Hashable, _Turn]()

    def __len__(self) -> int:
        return len(self._turns)

    @contextmanager
    def at(self, key: Hashable) -> Iterator[None]:
        """Wait for the turn, then hold it. Raises the interrupt of the call that waits."""
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
    """A lock, and its holder. The holder is the caller for which the thread with the lock works."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: Caller | None = None
