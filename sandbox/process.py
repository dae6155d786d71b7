"""One child process, as its worker has it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from sandbox import frames
from sandbox.exhausted import is_exhausted
from sandbox.recent import Recent

#: What a child has of the worker's environment: nothing that may be a secret.
_PASSED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")

#: One thread for each library, and allocators that reserve no more than they use.
_QUIET = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "ARROW_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKIO_WORKER_THREADS": "2",
}

_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from sandbox.child import main; main(int(sys.argv[2]))"
)

#: Seconds that a child may take to begin, or to import what a task needs; and to read what it is sent.
BEGIN_LIMIT_S = 60.0

#: Seconds in which a child ends that has closed its side.
_END_LIMIT_S = 1.0

#: A message of a child may take so many times what its task may.
_MESSAGE_TIMES = 2

#: What a task may take beside what its child has imported, where nothing else is said.
MEMORY_BYTES = 128 << 20


class Limits(NamedTuple):
    """What a task may take: seconds for each reply, and bytes of memory."""

    seconds: float
    memory_bytes: int = MEMORY_BYTES


class ChildFailed(Exception):
    """Raised with what became of a task, worded to follow what the task was for: "the check ..."."""


class ChildDied(ChildFailed):
    """Raised where a child has ended, be it by its task or by somebody's signal."""


class ChildTooSlow(ChildFailed):
    """Raised where a task did not reply in time."""


class ChildOutOfMemory(ChildFailed):
    """Raised where a task took more memory than a child may."""


Fetch = Callable[[Mapping[str, Any]], bytes]
"""Gives a task the bytes that it asks its worker for."""


class Child:
    """A child for one thread at a time. What raises ChildFailed has ended it.

    notes: texts that the child has seen lately, noted by its caller.
    """

    def __init__(self) -> None:
        self.notes: Recent[bool] = Recent()
        self._imported: set[str] = set()
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = self._begun(theirs.fileno())
            except BaseException:
                self._channel.close()
                raise

    @staticmethod
    def _begun(fd: int) -> subprocess.Popen[bytes]:
        """Begin the process. fd: its end of the socket pair."""
        own = {name: os.environ[name] for name in _PASSED if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            env={**own, **_QUIET},
            # A session of its own: Ctrl-C at the worker's terminal does not reach it.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, task: str, question: Mapping[str, Any], limits: Limits, body: bytes = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Return the one reply of a task, and the bytes behind it. Raises ChildFailed."""
        (reply,) = self.replies(task, question, limits, body)
        return reply

    def replies(
        self, task: str, question: Mapping[str, Any], limits: Limits, body: bytes = b"", fetch: Fetch | None = None
    ) -> Generator[tuple[dict[str, Any], bytearray], None, None]:
        """Yield what a task replies, one by one as asked for; closing the generator ends the task.

        task: "module:function". Raises ChildFailed, and what `fetch` raises.
        """
        is_done = False
        try:
            self._import(task.partition(":")[0])
            asked = {"task": task, "question": question, **limits._asdict()}
            message, found = self._told(asked, limits, body)
            while "end" not in message:
                if "fetch" in message:
                    assert fetch is not None
                    message, found = self._told({}, limits, fetch(message["fetch"]))
                    continue
                try:
                    yield message["reply"], found
                except GeneratorExit:
                    with suppress(ChildFailed):
                        message, _ = self._told({"stop": True}, limits)
                        is_done = "end" in message
                    raise
                message, found = self._told({}, limits)
            self._check_end(message, limits)
            is_done = True
        finally:
            if not is_done:
                self.close()

    def _import(self, module: str) -> None:
        if module not in self._imported:
            limits = Limits(BEGIN_LIMIT_S)
            message, _ = self._told({"task": module, "question": {}, **limits._asdict()}, limits)
            self._check_import(message)
            self._check_end(message, limits)
            self._imported.add(module)

    def _check_import(self, message: Mapping[str, Any]) -> None:
        """Raise what the machine lacked for a task's imports. These have no limits, and run no stranger's code."""
        if message["end"] == "memory":
            raise MemoryError("a child process found no memory for its imports")
        if message["end"] == "raised" and message["errno"] is not None:
            error = OSError(message["errno"], message["error"])
            if is_exhausted(error):
                raise error

    def _check_end(self, message: Mapping[str, Any], limits: Limits) -> None:
        if message["end"] == "memory":
            raise _out_of_memory(limits)
        if message["end"] == "raised":
            raise ChildFailed(f"raised {message['error']}")

    def _told(self, message: Mapping[str, Any], limits: Limits, body: bytes = b"") -> tuple[dict[str, Any], bytearray]:
        """Say something to the child; return what it says then."""
        try:
            frames.send(self._channel, message, body, BEGIN_LIMIT_S)
            return frames.receive(self._channel, _MESSAGE_TIMES * limits.memory_bytes, limits.seconds)
        except frames.TooLate:
            raise ChildTooSlow(f"went on for more than {limits.seconds:g} s") from None
        except (EOFError, OSError):
            raise self._died(limits) from None

    def _died(self, limits: Limits) -> ChildFailed:
        with suppress(subprocess.TimeoutExpired):  # so that what it ended with is told
            self._process.wait(_END_LIMIT_S)
        self.close()
        if self._process.returncode == frames.OUT_OF_MEMORY:
            return _out_of_memory(limits)
        return ChildDied(f"ended its process with {self._process.returncode}")

    def kill(self) -> None:
        """End it, whatever it is at; for any thread."""
        self._process.kill()

    def close(self) -> None:
        """End it and forget it; may be called more than once."""
        self.kill()
        self._process.wait()
        self._channel.close()


def _out_of_memory(limits: Limits) -> ChildOutOfMemory:
    return ChildOutOfMemory(f"took more than {limits.memory_bytes >> 20} MiB of memory")
