"""The program of a child process. It does one task after the other for the worker that started it."""

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

#: Seconds after the limit of a task at which a child ends by itself, in case its worker is gone.
_MARGIN_S = 5.0

#: Files that a child may have open.
MAX_FILES = 256

#: The most bytes of a message to a child.
_MAX_MESSAGE = 1 << 40

Body = bytes | memoryview

Reply = Mapping[str, Any] | tuple[Mapping[str, Any], Body]
"""A reply of a task: a message, or a message and the bytes that follow it."""


class Worker:
    """The worker, as a task in the child sees it. question, body: the message and the bytes of its request."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._devnull = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
        self._limit_s = 0.0
        self.question: dict[str, Any] = {}
        self.body = bytearray()

    def fetch(self, message: Mapping[str, Any]) -> bytearray:
        """Ask the worker for bytes, and return them."""
        _, body = self._exchange({"fetch": message})
        return body

    def do_tasks(self) -> None:
        """Do tasks until the worker is gone. Raises EOFError or OSError then."""
        request, self.body = frames.receive(self._channel, _MAX_MESSAGE)
        while True:
            self.question = request["question"]
            self._limit_s = request["seconds"]
            _limit_memory(request["memory_bytes"])
            self._limit_time()
            end = self._do_task(request["task"])
            self.question = {}
            self.body = bytearray()
            request, self.body = self._exchange(end)

    def _exchange(
        self, message: Mapping[str, Any], body: Body = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a message to the worker and return its next one. The worker may take any time for that."""
        faulthandler.cancel_dump_traceback_later()
        frames.send(self._channel, message, body)
        del message, body  # their memory is free while this process waits
        try:
            received = frames.receive(self._channel, _MAX_MESSAGE)
        except MemoryError:
            # The rest of this message is still unread, and would be taken for the next message.
            os._exit(frames.OUT_OF_MEMORY)
        self._limit_time()
        return received

    def _do_task(self, task: str) -> dict[str, Any]:
        """Do a task, and return how it ended. A task without a function only imports its module."""
        try:
            module, _, function = task.partition(":")
            if not function:
                with unlimited_memory():
                    importlib.import_module(module)
                return {"end": "done"}
            do: Callable[[Worker], Iterable[Reply]] = getattr(
                importlib.import_module(module), function
            )
            for reply in do(self):
                message, body = reply if isinstance(reply, tuple) else (reply, b"")
                request, _ = self._exchange({"reply": message}, body)
                if "stop" in request:
                    break
        except MemoryError:
            return {"end": "memory"}
        except Exception as error:  # noqa: BLE001  # strangers' code may raise anything
            text = f"{type(error).__name__}: {str(error)[:1000]}"
            error_number = error.errno if isinstance(error, OSError) else None
            return {"end": "raised", "error": text, "errno": error_number}
        return {"end": "done"}

    def _limit_time(self) -> None:
        """Have the system end this process if the next reply takes too long, by the clock or in CPU time."""
        faulthandler.dump_traceback_later(self._limit_s + _MARGIN_S, exit=True, file=self._devnull)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + self._limit_s + _MARGIN_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


_base_bytes = 0
"""Bytes of memory that imports take; 0 if the system does not tell. A task's limit counts from there."""


@contextmanager
def unlimited_memory() -> Iterator[None]:
    """Lift the memory limit for imports. Memory that is in use afterwards does not count towards a task's limit."""
    global _base_bytes
    limit_before, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))
    base_before = _base_bytes
    try:
        yield
    finally:
        _base_bytes = _data_bytes()
        limit = hard_limit
        if limit_before != hard_limit:
            # A task's limit was set: the task keeps what it had beyond the base.
            limit = limit_before - base_before + _base_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def _limit_memory(task_bytes: int) -> None:
    """Let this process take `task_bytes` beside what its imports take."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if _base_bytes:  # else the memory in use is not known, and could be over the limit already
        resource.setrlimit(resource.RLIMIT_DATA, (_base_bytes + task_bytes, hard))


def _data_bytes() -> int:
    """Return the bytes of this process' data; 0 if the system does not tell."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def main(fd: int) -> None:
    """Do tasks that come through the socket `fd`. What they print goes to the worker's log."""
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = min(files, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    with unlimited_memory():
        worker = Worker(socket.socket(fileno=fd))
    with suppress(EOFError, OSError):
        worker.do_tasks()
