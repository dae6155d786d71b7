"""Threads for the files of tasks: a slow file holds up no other one, and none has a thread for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from worker.threads.functions import Call, FunctionPool


class FilePool(FunctionPool):
    """Runs calls over files, of our own code, which asks whether it is interrupted.

    A read of a mount that hangs blocks in the kernel, and nothing can interrupt it. While a call is slow, its
    thread is relieved: another one takes its place, and it ends with the call. Those that are given up aside,
    there are never more than `most` threads.
    """

    def __init__(
        self, threads: int, most: int, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._relieved: set[threading.Thread] = set()
        super().__init__(threads, name, clock)

    def relieve(self, slow_s: float) -> None:
        """Let another thread take the place of each whose call goes on for more than `slow_s`."""
        for thread, call in list(self._running.items()):
            with self._lock:
                is_slow = thread not in self._relieved and seconds_since_begin(call, self._clock()) > slow_s
                if not is_slow or len(self._threads) >= self._most:
                    continue
                self._relieved.add(thread)
            self._add_thread()

    def interrupt_overdue(
        self, seconds: Callable[[Call, float], float], limit_s: float, error: type[Exception]
    ) -> None:
        """Interrupt the calls whose `seconds(call, now)` are more than `limit_s`."""
        for call in list(self._running.values()):
            if call.error is None and seconds(call, self._clock()) > limit_s:
                call.interrupt(error)

    def _was_relieved(self, thread: threading.Thread) -> bool:
        with self._lock:
            if thread not in self._relieved:
                return False
            self._relieved.discard(thread)
            self._threads.remove(thread)
            return True


def seconds_since_begin(call: Call, now: float) -> float:
    """Return how long a call has run; 0 for one that has not begun."""
    return 0.0 if call.began_at is None else now - call.began_at


def seconds_of_silence(call: Call, now: float) -> float:
    """Return since when a call has not asked whether it is interrupted; 0 for one that has not begun."""
    return 0.0 if call.alive_at is None else now - call.alive_at
