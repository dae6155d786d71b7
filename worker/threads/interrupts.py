"""Errors raised into a running thread from outside, which wait only while it imports."""

import ctypes
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


class Interruptible:
    """A stretch of a thread's work into which others may raise an error, but not while it imports.

    The error comes at the thread's next bytecode; during an import, which it could leave half done to other threads,
    it waits for the end. `raises` False is for our own code, which is not safe from that: it asks, with
    `check_interrupted`.

    """

    def __init__(self, raises: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._raises, self._clock = raises, clock
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self.error: type[BaseException] | None = None
        self._began_at: float | None = None
        self._alive_at: float | None = None
        self._interrupted_at: float | None = None
        self._waiting: type[BaseException] | None = None
        self._importing = False  # only the thread itself changes it, under the lock

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

    def heeded(self) -> None:
        """Forget the last interrupt, which has done its work."""
        with self._lock:
            self.error = self._interrupted_at = None

    def do(self, function: Callable[[], Any]) -> Any:
        """Call the function in this thread, once; raises its errors, and those from outside."""
        _current.work = self
        try:
            with self._lock:
                if self.error is not None:
                    raise self.error
                self._thread_id = threading.get_ident()
            self._began_at = self._alive_at = self._clock()
            return function()
        finally:
            _current.work = None
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


def current_work() -> Interruptible | None:
    """Return this thread's work for a job, None in a thread that nobody interrupts."""
    return getattr(_current, "work", None)


def check_interrupted() -> None:
    """Raise the interrupt of this thread's work, if any."""
    work = current_work()
    if work is not None:
        work.check()


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
        work = current_work()
        if work is None or _is_whole(name):
            return import_(name, *rest)
        return work.import_whole(lambda: import_(name, *rest))

    return shielded


def _is_whole(name: str) -> bool:
    """Whether a module is loaded and executed to its end; importlib looks the same way."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)
