"""Calls in threads, and interrupts: errors that another thread raises in a call.

An interrupt waits while the call imports a module.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

_IMPORT_WAIT_S = 30.0
"""Seconds that an import waits for another thread's import, so that an import that hangs does not block all others."""

_importlib: Any = sys.modules["_frozen_importlib"]
_current = threading.local()
_one_import = threading.Lock()


class _Replacement(BaseException):
    """Takes the place of an error that is still pending."""


def _raise_in(thread_id: int, error: type[BaseException]) -> None:
    """Raise an error in a thread at its next instruction. An earlier error that is still pending is dropped."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error))


def _drop_pending_error() -> None:
    """Drop an error that another thread has raised in this one, and that is still pending.

    A second error replaces the pending one, and is caught here. CPython can also drop the pending error without a
    second one, but CPython 3.11 would go on waiting for the dropped error: under a profiler, a debugger or coverage,
    all threads would stop at their next call of a function.
    """
    try:
        _raise_in(threading.get_ident(), _Replacement)
        for _ in range(1000):
            pass  # CPython raises pending errors between two rounds of a loop
    except _Replacement:
        pass


def as_class(error: Exception) -> type[Exception]:
    """Return a class whose instances are like this error, because only classes can be raised in another thread."""
    kind = type(error)

    def __init__(self: Exception) -> None:
        self.args = error.args

    # Tracebacks show the class by this name and module.
    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


class ThreadGivenUp(BaseException):
    """Raised inside a function that ignored its interrupt. No `except Exception` catches it."""


class Call:
    """A call in a thread of a pool. It runs once, hands its outcome to `done` once, and can be interrupted.

    A call that ignores its interrupt can be given up. It is then reported as ended, although its thread still runs.
    An interrupt is an error that is raised at the thread's next bytecode. During an import the error waits for the
    import's end, because otherwise other threads would get a half-imported module.
    is_interruptible: False for our own code, which an error at any bytecode could leave half done. That code calls
    `check_interrupted` instead.
    discard: called with the value if the call was given up but has returned after all.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        is_interruptible: bool = True,
        clock: Callable[[], float] = time.monotonic,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        self._function = function
        self._done = done
        self._discard = discard
        self._is_interruptible = is_interruptible
        self._clock = clock
        self._lock = threading.Lock()
        self._thread_id: int | None = None  # the thread, while the function runs
        # The last interrupt that was not obeyed yet.
        self.pending_interrupt: type[BaseException] | None = None
        self._began_at: float | None = None
        self._alive_at: float | None = None  # the last sign of life
        self._interrupted_at: float | None = None  # the first interrupt while the function ran
        self._delayed_error: type[BaseException] | None = None  # raised when the import ends
        self._importing = False  # only the thread itself changes it, under the lock
        self._given_up = False
        self._has_raised = False  # an interrupt was raised in the thread

    @property
    def running_s(self) -> float:
        """Seconds since the call began; 0 before it begins."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    @property
    def silent_s(self) -> float:
        """Seconds since the call's last sign of life; 0 before it begins."""
        return 0.0 if self._alive_at is None else self._clock() - self._alive_at

    def interrupt(self, error: type[BaseException]) -> None:
        """Raise `error` in the call now, or as soon as the call begins or checks for interrupts.

        Any thread may call this. After the call's end it does nothing.
        """
        with self._lock:
            self.pending_interrupt = error
            if self._thread_id is not None and self._interrupted_at is None:
                self._interrupted_at = self._clock()
            self._raise(error)

    def _raise(self, error: type[BaseException]) -> None:
        """Raise an error in the thread now, or once the thread's import has ended. The caller holds the lock."""
        if not self._is_interruptible or self._thread_id is None:
            return
        if self._importing:
            self._delayed_error = error
        else:
            self._has_raised = True
            _raise_in(self._thread_id, error)

    def check(self) -> None:
        """Raise the call's interrupt, if there is one. Otherwise note a sign of life."""
        if self.pending_interrupt is not None:
            raise self.pending_interrupt
        self._alive_at = self._clock()

    def check_while_waiting_for(self, holder: "Call | None") -> None:
        """Raise the call's interrupt, if there is one. Otherwise, take over the last sign of life of `holder`.

        A call that waits for another call does this again and again. As long as the other call is alive, the waiting
        call counts as alive too. holder: the other call; None if it is not known.
        """
        if self.pending_interrupt is not None:
            raise self.pending_interrupt
        holder_alive_at = None if holder is None else holder._alive_at
        if holder_alive_at is None:
            return
        if self._alive_at is None or holder_alive_at > self._alive_at:
            self._alive_at = holder_alive_at

    def note_obeyed(self) -> None:
        """Forget the last interrupt, because the call has obeyed it and goes on."""
        with self._lock:
            self.pending_interrupt = None
            self._interrupted_at = None

    def give_up(self, grace_s: float) -> str | None:
        """Give the call up, and report it as ended, if it still runs `grace_s` seconds after its interrupt.

        Returns the line of code at which the call hangs, or None if the call was not given up. The pool must not use
        the call's thread again.
        """
        with self._lock:
            if self._thread_id is None or self._interrupted_at is None or self._given_up:
                return None
            if self._clock() - self._interrupted_at <= grace_s:
                return None
            self._given_up = True
            code_line = _code_line(self._thread_id)
            interrupt = self.pending_interrupt
            assert interrupt is not None, "interrupted without an error"
            # The call is reported as ended by its interrupt. The thread has ignored the interrupt, so it now gets an
            # error that no `except Exception` catches.
            self._raise(ThreadGivenUp)
        self._done(None, interrupt())
        return code_line

    def run(self) -> bool:
        """Run the function in this thread and report its outcome. Returns False if the call was given up."""
        value = None
        failure = None
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
            # The error's traceback refers to this frame. If this frame also referred to the error, this cycle would
            # keep in memory what the call has used.
            failure = None
        return not self._given_up

    def _call(self) -> Any:
        """Call the function. Errors can be raised in this thread only while the function runs."""
        _current.call = self
        try:
            with self._lock:
                if self.pending_interrupt is not None:
                    raise self.pending_interrupt
                self._thread_id = threading.get_ident()
            self._began_at = self._clock()
            self._alive_at = self._began_at
            return self._function()
        finally:
            _current.call = None
            with self._lock:
                # Without a thread id, nobody raises a further error in this thread. So the id must go first.
                self._thread_id = None
                # An earlier error may still be pending. It occurs here or is dropped, so that it never hits what the
                # thread does next.
                if self._has_raised:
                    _drop_pending_error()

    def import_whole(self, load: Callable[[], Any]) -> Any:
        """Call `load`, which imports a module, and return its value. Interrupts wait for the end of the import."""
        if self._importing:  # the module that is being imported imports another one
            return load()
        try:
            with self._lock:
                self._importing = True
            # An interrupt that was raised before `_importing` was set occurs at the first bytecode of
            # `_one_at_a_time` at the latest, so it never cuts an import short.
            return _one_at_a_time(load)
        finally:
            with self._lock:
                self._importing = False
                error = self._delayed_error
                self._delayed_error = None
            if error is not None:
                raise error


def current_call() -> Call | None:
    """Return this thread's call; None in a thread that cannot be interrupted."""
    return getattr(_current, "call", None)


def check_interrupted() -> None:
    """Raise the interrupt of this thread's call, if any."""
    call = current_call()
    if call is not None:
        call.check()


def _code_line(thread_id: int) -> str:
    """Return the line of Python at which a thread is, or from which it has called a C function."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def _one_at_a_time(load: Callable[[], Any]) -> Any:
    """Call `load` as soon as no other interruptible thread imports, or after a wait of _IMPORT_WAIT_S.

    If the imports of two threads waited for each other, Python would give one of them a half-imported module.
    """
    has_lock = _one_import.acquire(timeout=_IMPORT_WAIT_S)
    try:
        return load()
    finally:
        if has_lock:
            _one_import.release()


def shield_imports() -> None:
    """Let interrupts wait while an interruptible thread imports. This changes importlib for the whole process.

    It wraps the two functions of importlib that CPython calls for a module that is not fully imported. Shielding
    finders and loaders would not be enough: importlib takes its lock before it calls them, and adds the module to its
    package after they return.
    """
    for name in ("_find_and_load", "_lock_unlock_module"):
        import_ = getattr(_importlib, name)
        if not hasattr(import_, "__wrapped__"):
            setattr(_importlib, name, _shielded(import_))


def _shielded(import_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper for a function of importlib. While the wrapper imports, interrupts wait."""

    @wraps(import_)
    def shielded(name: str, *args: Any) -> Any:
        call = current_call()
        if call is None or _is_whole(name):
            return import_(name, *args)
        return call.import_whole(lambda: import_(name, *args))

    return shielded


def _is_whole(name: str) -> bool:
    """Whether a module is fully imported. importlib decides this in the same way."""
    module = sys.modules.get(name)
    if module is None:
        return False
    spec = getattr(module, "__spec__", None)
    return not getattr(spec, "_initializing", False)
