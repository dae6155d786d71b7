"""Freezes a thread before one of its calls to Redis or to files, and kills it a call later if asked to.

What is frozen after a call and before the next is the same, but for the time that it has read: reading the
clock counts as a call, behind which it freezes.
"""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pyarrow.fs
from redis import ConnectionPool, Redis, UnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

import jobs

WAIT_S = 60.0
_OURS = os.path.dirname(jobs.__file__) + os.sep


class Killed(BaseException):
    """Stands for SIGKILL: no handler for errors may catch it."""


class Freezer:
    """Lists the calls of the thread that runs `run`; freezes it before call `at`, counted from 0.

    One more than there are calls freezes it behind the last. dies: it makes one more call once it is thawed.
    """

    def __init__(self, at: int | None = None, dies: bool = False) -> None:
        self.calls: list[str] = []
        self._at, self._dies = at, dies
        self._thread: threading.Thread | None = None
        self._frozen, self._thaw = threading.Event(), threading.Event()
        self._connections: list[UnixDomainSocketConnection] = []
        self._is_over = False
        self.error: BaseException | None = None
        self.value: Any = None

    def call(self, name: str) -> None:
        """Note that this thread is about to make a call, if it is the one that is watched."""
        if threading.current_thread() is not self._thread:
            return
        if self._dies and self._at is not None and len(self.calls) > self._at:
            raise Killed
        self.calls.append(f"{_site()} {name}")
        if len(self.calls) - 1 == self._at:
            self._freeze()

    def _freeze(self) -> None:
        self._frozen.set()
        assert self._thaw.wait(WAIT_S), "nobody thawed it"

    def start(self, work: Callable[[], Any]) -> None:
        """Run the work in a thread until it is frozen or over."""

        def run() -> None:
            try:
                self.value = work()
                if self._at is not None and len(self.calls) <= self._at:
                    self._freeze()
            except BaseException as error:  # noqa: BLE001  # the caller looks at what it was
                self.error = error
            self._frozen.set()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert self._frozen.wait(WAIT_S), "it neither ended nor came to the call"

    def thaw(self) -> None:
        """Let it go on to its end."""
        self._thaw.set()
        assert self._thread is not None
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "it does not end"
        self._is_over = True
        for connection in self._connections:
            connection.disconnect()

    def client(self, path: str) -> Redis:
        """A client whose commands, or whole pipelines, are calls."""
        freezer = self

        class Connection(UnixDomainSocketConnection):
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                freezer._connections.append(self)

            def _connect(self) -> Any:
                if freezer._is_over:  # a pipeline that is collected later would speak up once more
                    raise RedisConnectionError("its thread has ended")
                return super()._connect()

            def send_packed_command(self, command: Any, check_health: bool = True) -> None:
                if self._sock is not None and not _greets():
                    freezer.call("redis")
                super().send_packed_command(command, check_health)

        retry = Retry(NoBackoff(), 0)
        return Redis(connection_pool=ConnectionPool(connection_class=Connection, path=path, retry=retry))


def _greets() -> bool:
    """Whether a connection is being made: what it says of itself then is no call of ours."""
    frame: Any = sys._getframe(2)
    return any(each.f_code.co_name.startswith("on_connect") for each in _frames(frame))


def _frames(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _site() -> str:
    """The innermost line of `jobs` from which a call comes, and the functions there that led to it."""
    frame: Any = sys._getframe(2)
    ours = [each for each in _frames(frame) if each.f_code.co_filename.startswith(_OURS)]
    if not ours:
        return "?"
    names = " ".join(dict.fromkeys(each.f_code.co_name for each in ours))
    return f"{os.path.basename(ours[0].f_code.co_filename)}:{ours[0].f_lineno} {names}"


#: Functions of `os` that touch no file.
_PURE = {"fspath", "fsencode", "fsdecode", "strerror", "sysconf", "close", "getpid"}
_PURE_PATHS = {
    "join",
    "dirname",
    "basename",
    "split",
    "splitext",
    "isabs",
    "normpath",
    "abspath",
    "commonpath",
}


class Traced:
    """Stands in for a module or a file system: its functions are calls."""

    def __init__(self, real: Any, freezer: Freezer, pure: set[str], name: str) -> None:
        self._real, self._freezer, self._pure, self._name = real, freezer, pure, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if self._real is os and name == "path":
            return Traced(found, self._freezer, _PURE_PATHS, "os.path")
        if not callable(found) or isinstance(found, type) or name in self._pure or name.isupper():
            return found

        def traced(*args: Any, **kwargs: Any) -> Any:
            seen = found(*args, **kwargs) if self._real is time else None
            self._freezer.call(f"{self._name}.{name}")
            return found(*args, **kwargs) if seen is None else seen

        return traced


def modules_of_jobs() -> list[ModuleType]:
    """Every module of `jobs` that a run's planning, shards, submitting and cancelling may pass through."""
    names = [each.name for each in pkgutil.walk_packages(jobs.__path__, "jobs.")]
    return [importlib.import_module(name) for name in names]


@contextmanager
def traced_files(freezer: Freezer) -> Iterator[None]:
    """Make every call to files out of `jobs` one that freezes; others' threads are let pass."""
    replaced: list[tuple[ModuleType, str, Any]] = []

    def replace(module: ModuleType, name: str, stand_in: Any) -> None:
        replaced.append((module, name, module.__dict__.get(name)))
        setattr(module, name, stand_in)

    def traced_open(*args: Any, **kwargs: Any) -> Any:
        freezer.call("open")
        return builtins.open(*args, **kwargs)

    def local_files() -> Any:
        return Traced(pyarrow.fs.LocalFileSystem(), freezer, set(), "files")

    for module in modules_of_jobs():
        if module.__dict__.get("os") is os:
            replace(module, "os", Traced(os, freezer, _PURE, "os"))
        if module.__dict__.get("time") is time:
            replace(module, "time", Traced(time, freezer, {"sleep", "monotonic"}, "time"))
        if module.__dict__.get("LocalFileSystem") is pyarrow.fs.LocalFileSystem:
            replace(module, "LocalFileSystem", local_files)
        replace(module, "open", traced_open)
    try:
        yield
    finally:
        for module, name, value in replaced:
            if value is None:
                delattr(module, name)
            else:
                setattr(module, name, value)
