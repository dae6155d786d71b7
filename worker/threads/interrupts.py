"""Calls in threads, and errors raised into them from outside, which wait only while they import."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

_IMPORT_WAIT_S = 30.0
"""How long an import waits for another thread's: one that hangs must not hold up every function for ever."""

_importlib: Any = sys.modules["_frozen_importlib"]
_current = threading.local()
_one_import = threading.Lock()


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    target = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), target)


def as_class(error: Exception) -> type[Exception]:
    """Return a class whose instances are like this error: only classes can be raised in another thread."""
    kind = type(error)

    def __init__(self: Exception) -> None:
        self.args = error.args

    # The name under which tracebacks show it.
    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


class ThreadGivenUp(BaseException):
    """Raised inside a function that ignored its interrupt: no `except Exception` holds it up."""


class Call:
    """One call in a thread of a pool: it runs once, hands its outcome to `done` once, and can be interrupted.

    An error from outside comes at the thread's next bytecode; during an import, which it could leave half done to other
    threads, it waits for the end. `raises` False is for our own code, which is not safe from that: it asks, with
    `check_interrupted`. discard: takes the late value of a call that was given up.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        raises: bool = True,
        clock: Callable[[], float] = time.monotonic,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        self._function, self._done, self._discard = function, done, discard
        self._raises, self._clock = raises, clock
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self.error: type[BaseException] | None = None
        self._began_at: float | None = None
        self._alive_at: float | None = None
        self._interrupted_at: float | None = None
        self._waiting: type[BaseException] | None = None
        self._importing = False  # only the thread itself changes it, under the lock
        self._given_up = False

    @property
    def running_s(self) -> float:
        """Seconds since the work began; 0 before."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    @property
    def silent_s(self) -> float:
        """Seconds since the work last asked whether it is interrupted; 0 before it begins."""
        return 0.0 if self._alive_at is None else self._clock() - self._alive_at

    def interrupt(self, error: type[BaseException]) -> None:
        """Raise `error` in the work, or as soon as it starts or asks. Safe from any thread; void after its end."""
        with self._lock:
            self.error = error
            if self._thread_id is not None and self._interrupted_at is None:
                self._interrupted_at = self._clock()
            self._raise(error)

    def _raise(self, error: type[BaseException]) -> None:
        """Raise an error in the thread now or after its import; the caller holds the lock."""
        if not self._raises or self._thread_id is None:
            return
        if self._importing:
            self._waiting = error
        else:
            _raise_in(self._thread_id, error)

    def check(self) -> None:
        """Raise the work's interrupt, if any; else note that it is alive."""
        if self.error is not None:
            raise self.error
        self._alive_at = self._clock()

    def wait_for(self, holder: "Call | None") -> None:
        """Raise the work's interrupt, if any. Else count it as alive as the call that holds the turn."""
        if self.error is not None:
            raise self.error
        signs = [self._alive_at, None if holder is None else holder._alive_at]
        self._alive_at = max((at for at in signs if at is not None), default=None)

    def heeded(self) -> None:
        """Forget the last interrupt, which has done its work."""
        with self._lock:
            self.error = self._interrupted_at = None

    def give_up(self, grace_s: float) -> str | None:
        """Report the call as ended by its interrupt, if it goes on more than `grace_s` after it.

        Returns the place in which it hangs, and its thread is lost; None for any other call.
        """
        with self._lock:
            if self._thread_id is None or self._interrupted_at is None or self._given_up:
                return None
            if self._clock() - self._interrupted_at <= grace_s:
                return None
            self._given_up = True
            place = _place(self._thread_id)
            self._raise(ThreadGivenUp)
            error = self.error() if self.error is not None else ThreadGivenUp()
        self._done(None, error)
        return place

    def run(self) -> bool:
        """Run the function in this thread and report its outcome. False: the thread was given up."""
        value, failure = None, None
        try:
            value = self._call()
        except BaseException as error:  # noqa: BLE001  # user code raises what it likes; `done` reports it
            failure = error
        try:
            if not self._given_up:
                self._done(value, failure)
            elif failure is None and self._discard is not None:
                self._discard(value)
        finally:
            failure = None  # its traceback holds this frame: together they would keep what the call has used
        return not self._given_up

    def _call(self) -> Any:
        _current.call = self
        try:
            with self._lock:
                if self.error is not None:
                    raise self.error
                self._thread_id = threading.get_ident()
            self._began_at = self._alive_at = self._clock()
            return self._function()
        finally:
            _current.call = None
            with self._lock:
                # In this order: from here on nobody raises; what was raised comes at the call, if it has not
                # come before, or is taken back by it, and does not hit what the thread does next.
                self._thread_id = None
                _raise_in(threading.get_ident(), None)

    def import_whole(self, load: Callable[[], Any]) -> Any:
        """Import by `load` and return its value; errors from outside wait for its end."""
        if self._importing:  # a module that this one imports
            return load()
        try:
            with self._lock:
                self._importing = True
            # An error raised before comes now, at the latest with the call's first bytecode.
            return _one_at_a_time(load)
        finally:
            with self._lock:
                self._importing = False
                error, self._waiting = self._waiting, None
            if error is not None:
                raise error


def current_call() -> Call | None:
    """Return this thread's call, None in a thread that nobody interrupts."""
    return getattr(_current, "call", None)


def check_interrupted() -> None:
    """Raise the interrupt of this thread's call, if any."""
    call = current_call()
    if call is not None:
        call.check()


def _place(thread_id: int) -> str:
    """Return the line of Python at which a thread is, or is in a C function."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def _one_at_a_time(load: Callable[[], Any]) -> Any:
    """Import in one interruptible thread at a time: breaking deadlocks, Python hands out half a module."""
    is_ours = _one_import.acquire(timeout=_IMPORT_WAIT_S)
    try:
        return load()
    finally:
        if is_ours:
            _one_import.release()


def shield_imports() -> None:
    """Let errors from outside wait while an interruptible thread imports. For the whole process, once.

    It replaces the two functions of importlib that CPython looks up for every import of a module that is not whole. A
    finder or loader would come too late and leave too soon: importlib locks before it asks one, and ties a module to
    its package after.
    """
    for name in ("_find_and_load", "_lock_unlock_module"):
        import_ = getattr(_importlib, name)
        if not hasattr(import_, "__wrapped__"):
            setattr(_importlib, name, _shielded(import_))


def _shielded(import_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(import_)
    def shielded(name: str, *rest: Any) -> Any:
        call = current_call()
        if call is None or _is_whole(name):
            return import_(name, *rest)
        return call.import_whole(lambda: import_(name, *rest))

    return shielded


def _is_whole(name: str) -> bool:
    """Whether a module is loaded and executed to its end; importlib looks the same way."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)
