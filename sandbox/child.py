"""The program of a child: it does one task after the other for the worker that started it."""

import faulthandler
import importlib
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sandbox import frames

#: How much later than its worker would end it a child ends by itself: the worker may be gone.
_MARGIN_S = 5.0

#: Files that a child may have open.
MAX_FILES = 256

#: Bytes of one message to a child.
_MAX_MESSAGE = 1 << 40

Body = bytes | memoryview

Reply = Mapping[str, Any] | tuple[Mapping[str, Any], Body]
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
        """Ask the worker for bytes."""
        return self._say({"fetch": message})[1]

    def do_tasks(self) -> None:
        """Do what is asked until nobody asks any more. Raises EOFError or OSError then."""
        asked, self.body = frames.receive(self._channel, _MAX_MESSAGE)
        while True:
            self.question, self._limit_s = asked["question"], asked["seconds"]
            _limit_memory(asked["memory_bytes"])
            self._limit_time()
            end = self._ended(asked["task"])
            self.question, self.body = {}, bytearray()
            asked, self.body = self._say(end)

    def _say(self, message: Mapping[str, Any], body: Body = b"") -> tuple[dict[str, Any], bytearray]:
        """Send something to the worker; return what it says then, for which it may take any time."""
        faulthandler.cancel_dump_traceback_later()
        frames.send(self._channel, message, body)
        del message, body
        try:
            found = frames.receive(self._channel, _MAX_MESSAGE)
        except MemoryError:  # what is left of the message would be taken for the next one
            os._exit(frames.OUT_OF_MEMORY)
        self._limit_time()
        return found

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
                said, _ = self._say({"reply": message}, body)
                if "stop" in said:
                    break
        except MemoryError:
            return {"end": "memory"}
        except Exception as error:  # noqa: BLE001  # what strangers wrote raises what it likes
            shown = f"{type(error).__name__}: {str(error)[:1000]}"
            return {"end": "raised", "error": shown, "errno": error.errno if isinstance(error, OSError) else None}
        return {"end": "done"}

    def _limit_time(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s + _MARGIN_S, exit=True, file=self._nothing)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + self._limit_s + _MARGIN_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


_base_bytes = 0


@contextmanager
def unlimited_memory() -> Iterator[None]:
    """Import within it: what is there behind it is no part of the limit, which counts what comes later."""
    global _base_bytes
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    base = _base_bytes
    try:
        yield
    finally:
        _base_bytes = _data_bytes()
        more = hard if before == hard else before - base + _base_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (more, hard))


def _limit_memory(more_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if _base_bytes:  # else the system does not tell, and a limit would end what has begun
        resource.setrlimit(resource.RLIMIT_DATA, (_base_bytes + more_bytes, hard))


def _data_bytes() -> int:
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def main(fd: int) -> None:
    """Do tasks through the socket's file descriptor. What they print goes to the worker's log."""
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, MAX_FILES),) * 2)
    with unlimited_memory():
        worker = Worker(socket.socket(fileno=fd))
    with suppress(EOFError, OSError):
        worker.do_tasks()
