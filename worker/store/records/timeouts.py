"""RQ's time limits, for code that runs in the threads of a pool."""

from __future__ import annotations

import threading
from typing import Any

from rq.timeouts import JobTimeoutException, TimerDeathPenalty

from worker.threads.interrupts import current_work

__all__ = ["JobTimeoutException", "ThreadDeathPenalty", "timeout_error"]


class ThreadDeathPenalty(TimerDeathPenalty):
    """RQ's time limit for callbacks, for the threads of a pool.

    RQ's own writes its message into the exception class, which threads share: each limit gets a subclass.
    Its timer would also raise into whatever the thread does next.
    """

    def __init__(
        self, timeout: float, exception: type[Exception] = JobTimeoutException, **kwargs: Any
    ) -> None:
        super().__init__(timeout, type(exception.__name__, (exception,), {}), **kwargs)
        self._work, self._lock, self._is_over = current_work(), threading.Lock(), False

    def handle_death_penalty(self) -> None:
        """Interrupt the call, unless what was limited in it is over; called by the timer's thread."""
        with self._lock:
            if self._work is not None and not self._is_over:
                self._work.interrupt(self._exception)

    def cancel_death_penalty(self) -> None:
        """Leave the rest of the call alone. RQ's caller swallows the limit's error where it comes here."""
        try:
            with self._lock:
                self._is_over = True
            super().cancel_death_penalty()
        finally:
            if self._work is not None:
                self._work.heeded()


def timeout_error(timeout_s: float) -> type[JobTimeoutException]:
    """An exception class that says which limit was passed: only classes can be raised in another thread."""
    message = f"Task exceeded maximum timeout value ({timeout_s:g} seconds)"

    def __init__(self: JobTimeoutException) -> None:
        super(JobTimeoutException, self).__init__(message)

    # The name under which tracebacks show RQ's own.
    names = {"__init__": __init__, "__module__": JobTimeoutException.__module__}
    return type("JobTimeoutException", (JobTimeoutException,), names)
