"""The program of a child: it does one task after the other for the worker that started it."""

from __future__ import annotations

import faulthandler
import importlib
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import frames

#: How much later than its worker would end it a child ends by itself: the worker may be gone.
_MARGIN_S = 5.0

#: Files that a child may have open.
MAX_FILES = 256

#: Bytes of one message to a child.
_MAX_MESSAGE = 1 << 40

Reply = Mapping[str, Any] | tuple[Mapping[str, Any], bytes]
"""What a task gives its worker: a message, or one with bytes behind it."""


class Worker:
    """The worker, as a task sees it. question, body: what it asks."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._nothing = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        self._limit_s = 0.0
        self.question: dict[str, Any] = {}
        self.body = bytearray()

    def fetch(self, message: Mapping[str, Any]) -> bytearray:
        """Ask the worker for bytes. Raises OSError where it has none."""
        with self._unlimited_time():
            frames.send(self._channel, {"fetch": message})
            reply, body = frames.receive(self._channel, _MAX_MESSAGE)
        if "error" in reply:
            raise OSError(reply["error"])
        return body

    def do_tasks(self) -> None:
        """Do what is asked until nobody asks any more. Raises EOFError or OSError then."""
        while True:
            asked, self.body = frames.receive(self._channel, _MAX_MESSAGE)
            self.question, self._limit_s = asked["question"], asked["limit_s"]
            self._limit_time()
            end = self._ended(asked["task"])
            with self._unlimited_time():
                frames.send(self._channel, end)
                self.question, self.body = {}, bytearray()

    def _ended(self, task: str) -> dict[str, Any]:
        """Do a task; return how it ended."""
        try:
            module, _, function = task.partition(":")
            if not function:
                with unlimited_memory():
                    importlib.import_module(module)
                return {"end": "done"}
            do: Callable[[Worker], Iterable[Reply]] = getattr(importlib.import_module(module), function)
            for reply in do(self):
                message, body = reply if isinstance(reply, tuple) else (reply, b"")
                with self._unlimited_time():
                    frames.send(self._channel, {"reply": message}, body)
        except MemoryError:
            return {"end": "memory"}
        except Exception as error:  # noqa: BLE001  # what strangers wrote raises what it likes
            return {"end": "raised", "error": f"{type(error).__name__}: {str(error)[:1000]}"}
        return {"end": "done"}

    def _limit_time(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s + _MARGIN_S, exit=True, file=self._nothing)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + self._limit_s + _MARGIN_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))

    @contextmanager
    def _unlimited_time(self) -> Iterator[None]:
        faulthandler.cancel_dump_traceback_later()
        yield
        self._limit_time()


_memory_bytes = 0


@contextmanager
def unlimited_memory() -> Iterator[None]:
    """Import within it: what is there behind it is no part of the limit, which counts what comes later."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        with suppress(OSError):  # a system without /proc: there the limit would end what has begun
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            most = pages * resource.getpagesize() + _memory_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main(fd: int, memory_bytes: int) -> None:
    """Do tasks through the socket's file descriptor. What they print goes to the worker's log."""
    global _memory_bytes
    _memory_bytes = memory_bytes
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, MAX_FILES),) * 2)
    with suppress(EOFError, OSError):
        Worker(socket.socket(fileno=fd)).do_tasks()
