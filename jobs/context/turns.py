"""Locks by key. The thread that holds the lock of a key has the turn at that key.

A thread that waits for a turn does nothing meanwhile. It counts as alive as long as the thread that has the turn counts
as alive.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

#: How often a waiting thread checks the holder of the turn, in seconds.
CHECK_EVERY_S = 0.2


class WatchedCall(Protocol):
    """A call that is watched. It is interrupted if it shows no sign of life for long."""

    def check_while_waiting_for(self, holder: Any) -> None:
        """Count the holder's last sign of life as this call's own.

        Raises the error that interrupts this call, if it is interrupted.
        holder: the call that has the turn; None if the holder is not known.
        """


def nobody() -> None:
    """Return None. Used as `current_call` where calls are not watched."""


class Turns:
    """Locks by key, each with a holder that waiting threads watch. Thread-safe.

    current_call: returns the call that the current thread carries out; None if calls are not watched.
    """

    def __init__(self, current_call: Callable[[], WatchedCall | None] = nobody) -> None:
        self._current_call = current_call
        self._lock = threading.Lock()
        # A turn is kept while a thread holds it or waits for it.
        self._turns = WeakValueDictionary[Hashable, _Turn]()

    def __len__(self) -> int:
        return len(self._turns)

    @contextmanager
    def at(self, key: Hashable) -> Iterator[None]:
        """Wait for the lock of a key, and hold the lock during the `with`.

        Raises the error that interrupts the current call, if the call is interrupted while it waits.
        """
        call = self._current_call()
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
        while not turn.lock.acquire(timeout=CHECK_EVERY_S):
            if call is not None:
                call.check_while_waiting_for(turn.holder)
        turn.holder = call
        try:
            yield
        finally:
            turn.holder = None
            turn.lock.release()


class _Turn:
    """A lock. holder: the call in which a thread holds the lock; None if the lock is free or the call is not known."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holder: WatchedCall | None = None
