"""Child: a child process, as its worker uses it."""

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

#: The variables that a child gets from the worker's environment. None may hold a secret.
_PASSED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")

#: Variables for one thread for each library, and for allocators that reserve no more than they use.
_QUIET = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "ARROW_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKIO_WORKER_THREADS": "2",
}

_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sandbox.child import main; main(int(sys.argv[2]))"
)

#: Seconds that a child may take to start, to import a task's module, or to read a message.
BEGIN_LIMIT_S = 60.0

#: Seconds that a child may take to end after it has closed its side of the socket.
_END_LIMIT_S = 1.0

#: A message from a child may have this many times the bytes of its task's memory limit.
_MESSAGE_TIMES = 2

#: The default memory limit of a task, beside what its child has imported.
MEMORY_BYTES = 128 << 20


class Limits(NamedTuple):
    """The limits of a task: seconds for each reply, and bytes of memory."""

    seconds: float
    memory_bytes: int = MEMORY_BYTES


class ChildFailed(Exception):
    """Raised if a task failed. The message says how, as a verb that follows a subject such as "the check"."""


class ChildDied(ChildFailed):
    """Raised if a child process has ended before its task, through the task itself or a signal."""


class ChildTooSlow(ChildFailed):
    """Raised if a task did not reply in time."""


class ChildOutOfMemory(ChildFailed):
    """Raised if a task needed more memory than its limit."""


Fetch = Callable[[Mapping[str, Any]], bytes]
"""Returns the bytes that a task asks its worker for."""


class Child:
    """A child process, for one thread at a time. A call that raises ChildFailed has ended the process.

    notes: the texts that the child remembers. The caller writes them here.
    """

    def __init__(self) -> None:
        self.notes: Recent[bool] = Recent()
        self._imported: set[str] = set()
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = self._start(theirs.fileno())
            except BaseException:
                self._channel.close()
                raise

    @staticmethod
    def _start(fd: int) -> subprocess.Popen[bytes]:
        """Start the process. fd: its end of the socket pair."""
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            env={**passed, **_QUIET},
            # In a new session, Ctrl-C at the worker's terminal does not reach it.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask(
        self, task: str, question: Mapping[str, Any], limits: Limits, body: bytes = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Return the only reply of a task, and the bytes that follow it. Raises ChildFailed."""
        (reply,) = self.replies(task, question, limits, body)
        return reply

    def replies(
        self,
        task: str,
        question: Mapping[str, Any],
        limits: Limits,
        body: bytes = b"",
        fetch: Fetch | None = None,
    ) -> Generator[tuple[dict[str, Any], bytearray], None, None]:
        """Yield the replies of a task, each computed when it is asked for. Closing the generator ends the task.

        task: "module:function". fetch: returns bytes that the task asks for. Raises ChildFailed, and errors of `fetch`.
        """
        is_done = False
        try:
            self._import(task.partition(":")[0])
            request = {"task": task, "question": question, **limits._asdict()}
            message, reply_body = self._exchange(request, limits, body)
            while "end" not in message:
                if "fetch" in message:
                    assert fetch is not None
                    message, reply_body = self._exchange({}, limits, fetch(message["fetch"]))
                    continue
                try:
                    yield message["reply"], reply_body
                except GeneratorExit:
                    with suppress(ChildFailed):
                        message, _ = self._exchange({"stop": True}, limits)
                        is_done = "end" in message
                    raise
                message, reply_body = self._exchange({}, limits)
            self._check_end(message, limits)
            is_done = True
        finally:
            if not is_done:
                self.close()

    def _import(self, module: str) -> None:
        """Have the child import a task's module, unless it has done so before."""
        if module in self._imported:
            return
        limits = Limits(BEGIN_LIMIT_S)
        message, _ = self._exchange({"task": module, "question": {}, **limits._asdict()}, limits)
        self._check_import(message)
        self._check_end(message, limits)
        self._imported.add(module)

    def _check_import(self, message: Mapping[str, Any]) -> None:
        """Raise an error if the machine ran out of something. Imports run only our code, and have no limits."""
        if message["end"] == "memory":
            raise MemoryError("a child process found no memory for its imports")
        if message["end"] == "raised" and message["errno"] is not None:
            error = OSError(message["errno"], message["error"])
            if is_exhausted(error):
                raise error

    def _check_end(self, message: Mapping[str, Any], limits: Limits) -> None:
        """Raise ChildFailed if a task did not end well."""
        if message["end"] == "memory":
            raise _out_of_memory(limits)
        if message["end"] == "raised":
            raise ChildFailed(f"raised {message['error']}")

    def _exchange(
        self, message: Mapping[str, Any], limits: Limits, body: bytes = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a message to the child and return its next one. Raises ChildFailed."""
        try:
            frames.send(self._channel, message, body, BEGIN_LIMIT_S)
            return frames.receive(
                self._channel, _MESSAGE_TIMES * limits.memory_bytes, limits.seconds
            )
        except frames.TooLate:
            raise ChildTooSlow(f"went on for more than {limits.seconds:g} s") from None
        except (EOFError, OSError):
            raise self._died(limits) from None

    def _died(self, limits: Limits) -> ChildFailed:
        """Close a child that has closed its side, and return the error that says how it ended."""
        with suppress(subprocess.TimeoutExpired):  # wait for its exit status
            self._process.wait(_END_LIMIT_S)
        self.close()
        if self._process.returncode == frames.OUT_OF_MEMORY:
            return _out_of_memory(limits)
        return ChildDied(f"ended its process with {self._process.returncode}")

    def kill(self) -> None:
        """Kill the process, whatever it does. For any thread."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and free what it took. May be called more than once."""
        self.kill()
        self._process.wait()
        self._channel.close()


def _out_of_memory(limits: Limits) -> ChildOutOfMemory:
    return ChildOutOfMemory(f"took more than {limits.memory_bytes >> 20} MiB of memory")
