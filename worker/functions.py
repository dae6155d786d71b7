"""Threads for everything that may block: user functions, callbacks, and the files of Parquet runs."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from typing import Any

from rq.timeouts import JobTimeoutException, TimerDeathPenalty


class JobStopped(Exception):
    """Raised inside a function whose job was stopped, cancelled or taken over."""


class ThreadGivenUp(BaseException):
    """Raised inside a function that did not heed its interrupt: no `except Exception` holds it up."""


def _raise_in_thread(thread_id: int, error: type[BaseException] | None) -> None:
    target = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), target)


class Call:
    """One call in a pool: runs once, hands its outcome to `done` once, and can be interrupted."""

    def __init__(
        self,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._function, self._done, self._clock = function, done, clock
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._interrupt: type[BaseException] | None = None
        self._interrupted_at: float | None = None
        self._given_up = False

    def interrupt(self, error: type[BaseException], *, running: bool = True) -> None:
        """Raise `error` before the call starts or, if it is `running` ones too, at its next bytecode.

        Code that waits inside a C function sees it when that returns. Safe from any thread; without
        effect once the call has ended.
        """
        with self._lock:
            self._interrupt = error
            if running and self._thread_id is not None:
                if self._interrupted_at is None:
                    self._interrupted_at = self._clock()
                _raise_in_thread(self._thread_id, error)

    def heeded(self) -> None:
        """The last interrupt has ended what it was meant for; what follows in this call may take its time."""
        with self._lock:
            self._interrupt = self._interrupted_at = None

    def give_up(self, grace_s: float) -> str | None:
        """Report the call as ended by its interrupt, if it goes on more than `grace_s` after it.

        Returns the place in which it hangs; None for any other call. Its thread is then no good any more.
        """
        with self._lock:
            if self._thread_id is None or self._interrupted_at is None or self._given_up:
                return None
            if self._clock() - self._interrupted_at <= grace_s:
                return None
            self._given_up = True
            place = _place(self._thread_id)
            _raise_in_thread(self._thread_id, ThreadGivenUp)
            error = self._interrupt() if self._interrupt is not None else ThreadGivenUp()
        self._done(None, error)
        return place

    def run(self) -> bool:
        """Run the function in this thread and report its outcome. False: the thread was given up."""
        value, failure = None, None
        _running.call = self
        try:
            self._begin()
            value = self._function()
        except BaseException as error:  # noqa: BLE001  # user code raises what it likes; `done` reports it
            failure = error
        while self._thread_id is not None:
            try:
                self._end()
            except BaseException as error:  # noqa: BLE001  # an interrupt that came in the last moment
                failure = error
        try:
            if not self._given_up:
                self._done(value, failure)
        finally:
            _running.call = None
            failure = None  # its traceback holds this frame: together they would keep what the call has used
        return not self._given_up

    def _begin(self) -> None:
        with self._lock:
            if self._interrupt is not None:
                raise self._interrupt
            self._thread_id = threading.get_ident()

    def _end(self) -> None:
        with self._lock:
            # An interrupt that has not been raised yet must not hit the next call.
            _raise_in_thread(threading.get_ident(), None)
            self._thread_id = None


class _Running(threading.local):
    call: Call | None = None


_running = _Running()
"""The call that a pool's thread is at."""


def _place(thread_id: int) -> str:
    """The line of Python at which a thread is: all that can be told of a C function that does not return."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


class FunctionPool:
    """Daemon threads that run calls in the order given: none can hold up the worker's exit for ever.

    A thread whose call does not heed its interrupt can be given up: another one takes its place, and it
    ends, whenever its call does, without taking a further one.
    """

    def __init__(self, threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, Call] = {}
        self._stuck: set[threading.Thread] = set()
        self._numbers = count()
        self._threads: list[threading.Thread] = []
        for _ in range(threads):
            self._add_thread()

    @property
    def num_stuck(self) -> int:
        """Threads that were given up and have not ended."""
        return len(self._stuck)

    def _add_thread(self) -> None:
        name = f"{self._name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        thread = threading.current_thread()
        while (call := self._calls.get()) is not None:
            self._running[thread] = call
            goes_on = call.run()
            del self._running[thread], call
            if not goes_on:
                with self._lock:  # not before it was counted
                    self._stuck.discard(thread)
                return

    def submit(self, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> Call:
        """Run `function()` in a thread, then `done(value, error)`, there too unless it is given up."""
        call = Call(function, done, self._clock)
        self._calls.put(call)
        return call

    def give_up_stuck(self, grace_s: float) -> list[str]:
        """Replace the threads whose calls go on more than `grace_s` after their interrupt.

        Each such call is reported as ended by it. Returns where they hang. One thread calls this and `close`.
        """
        places = []
        for thread, call in list(self._running.items()):
            with self._lock:
                place = call.give_up(grace_s)
                if place is None:
                    continue
                self._stuck.add(thread)
            self._threads.remove(thread)
            self._add_thread()
            places.append(f"{thread.name} in {place}")
        return places

    def end(self) -> None:
        """Let the threads end once the calls given so far are done."""
        for _ in self._threads:
            self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, but for stuck ones, at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """End the threads once the calls given so far are done; wait for that at most `timeout_s`."""
        self.end()
        self.join(timeout_s)


class ThreadDeathPenalty(TimerDeathPenalty):
    """RQ's time limit for callbacks, for the threads of a pool.

    RQ's own writes its message into the exception class, which threads share: each limit gets a subclass.
    Its timer would also raise into whatever the thread does next.
    """

    def __init__(
        self, timeout: float, exception: type[Exception] = JobTimeoutException, **kwargs: Any
    ) -> None:
        super().__init__(timeout, type(exception.__name__, (exception,), {}), **kwargs)
        self._call = _running.call

    def handle_death_penalty(self) -> None:
        """Interrupt the call; called by the timer's thread."""
        if self._call is not None:
            self._call.interrupt(self._exception)

    def cancel_death_penalty(self) -> None:
        """Leave the rest of the call alone."""
        super().cancel_death_penalty()
        if self._call is not None:
            self._call.heeded()


def timeout_error(timeout_s: float) -> type[JobTimeoutException]:
    """An exception class that says which limit was passed: only classes can be raised in another thread."""
    message = f"Task exceeded maximum timeout value ({timeout_s:g} seconds)"

    def __init__(self: JobTimeoutException) -> None:
        super(JobTimeoutException, self).__init__(message)

    # The name under which tracebacks show RQ's own.
    names = {"__init__": __init__, "__module__": JobTimeoutException.__module__}
    return type("JobTimeoutException", (JobTimeoutException,), names)
