"""Threads for everything that may block: user functions, callbacks, and the files of Parquet runs."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from rq.timeouts import JobTimeoutException, TimerDeathPenalty


class JobStopped(Exception):
    """Raised inside a function whose job was stopped, cancelled or taken over."""


def _raise_in_thread(thread_id: int, error: type[BaseException] | None) -> None:
    target = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), target)


class Call:
    """One call in a pool: runs once, hands its outcome to `done`, and can be interrupted."""

    def __init__(
        self, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        self._function, self._done = function, done
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._interrupt: type[BaseException] | None = None

    def interrupt(self, error: type[BaseException], *, running: bool = True) -> None:
        """Raise `error` before the call starts or, if it is `running` ones too, at its next bytecode.

        Code that waits inside a C function sees it when that returns. Safe from any thread; without
        effect once the call has ended.
        """
        with self._lock:
            self._interrupt = error
            if running and self._thread_id is not None:
                _raise_in_thread(self._thread_id, error)

    def run(self) -> None:
        """Run the function in this thread and report its outcome."""
        value, failure = None, None
        try:
            try:
                with self._lock:
                    if self._interrupt is not None:
                        raise self._interrupt
                    self._thread_id = threading.get_ident()
                value = self._function()
            finally:
                with self._lock:
                    # An interrupt that has not been raised yet must not hit the next call.
                    _raise_in_thread(threading.get_ident(), None)
                    self._thread_id = None
        except BaseException as error:  # noqa: BLE001  # user code raises what it likes; `done` reports it
            failure = error
        try:
            self._done(value, failure)
        finally:
            failure = None  # its traceback holds this frame: together they would keep what the call has used


class FunctionPool:
    """Daemon threads that run calls in the order given: none can hold up the worker's exit for ever."""

    def __init__(self, threads: int, name: str) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()

    def submit(self, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> Call:
        """Run `function()` in a thread, then `done(value, error)` in the same thread."""
        call = Call(function, done)
        self._calls.put(call)
        return call

    def close(self, timeout_s: float) -> None:
        """End the threads once the calls given so far are done; wait for that at most `timeout_s`."""
        for _ in self._threads:
            self._calls.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


class ThreadDeathPenalty(TimerDeathPenalty):
    """RQ's time limit for callbacks, for any thread.

    RQ's own writes its message into the exception class, which threads share: each limit gets a subclass.
    """

    def __init__(
        self, timeout: float, exception: type[Exception] = JobTimeoutException, **kwargs: Any
    ) -> None:
        super().__init__(timeout, type(exception.__name__, (exception,), {}), **kwargs)


def timeout_error(timeout_s: float) -> type[JobTimeoutException]:
    """An exception class that says which limit was passed: only classes can be raised in another thread."""
    message = f"Task exceeded maximum timeout value ({timeout_s:g} seconds)"

    def __init__(self: JobTimeoutException) -> None:
        super(JobTimeoutException, self).__init__(message)

    # The name under which tracebacks show RQ's own.
    names = {"__init__": __init__, "__module__": JobTimeoutException.__module__}
    return type("JobTimeoutException", (JobTimeoutException,), names)
