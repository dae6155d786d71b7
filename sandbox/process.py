"""One child process, as its worker has it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

from . import frames

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
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from sandbox.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)

#: Seconds that a child may take to begin, or to import what a task needs; and to read what it is sent.
BEGIN_LIMIT_S = 60.0

#: A message of a child may take so many times what the child itself may.
_MESSAGE_TIMES = 2


class ChildFailed(Exception):
    """Raised with what became of a task, worded to follow what the task was for: "the check ..."."""


class ChildDied(ChildFailed):
    """Raised where a child has ended, be it by its task or by somebody's signal."""


class ChildTooSlow(ChildFailed):
    """Raised where a task did not reply in time."""


class ChildOutOfMemory(ChildFailed):
    """Raised where a task took more memory than a child may."""


Fetch = Callable[[Mapping[str, Any]], bytes]
"""Gives a task the bytes that it asks its worker for; raises OSError where there are none."""


class Child:
    """A child for one thread at a time. What raises ChildFailed has ended it.

    memory_bytes: that its tasks may take beside what they import. notes: for who asks it, what it knows.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.notes: set[str] = set()
        self._imported: set[str] = set()
        self._memory_bytes = memory_bytes
        self._channel, theirs = socket.socketpair()
        own = {name: os.environ[name] for name in _PASSED if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _PROGRAM,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                    str(memory_bytes),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**own, **_QUIET},
                # Of a session of its own: what interrupts the worker from its terminal is not meant for it.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, task: str, question: Mapping[str, Any], limit_s: float, body: bytes = b""
    ) -> dict[str, Any]:
        """Return the one reply of a task. Raises ChildFailed."""
        (reply, _), *_ = self.replies(task, question, limit_s, body)
        return reply

    def replies(
        self,
        task: str,
        question: Mapping[str, Any],
        limit_s: float,
        body: bytes = b"",
        *,
        fetch: Fetch | None = None,
    ) -> Generator[tuple[dict[str, Any], bytearray], None, None]:
        """Yield what a task replies, each within limit_s. Raises ChildFailed, and what `fetch` raises.

        task: "module:function". A generator that is closed before its end has ended the child.
        """
        is_done = False
        try:
            module = task.partition(":")[0]
            if module not in self._imported:
                self._send({"task": module, "question": {}, "limit_s": BEGIN_LIMIT_S}, b"")
                self._check_end(self._receive(BEGIN_LIMIT_S)[0])
                self._imported.add(module)
            self._send({"task": task, "question": question, "limit_s": limit_s}, body)
            while True:
                message, found = self._receive(limit_s)
                if "fetch" in message:
                    assert fetch is not None
                    self._serve(fetch, message["fetch"])
                elif "reply" in message:
                    yield message["reply"], found
                else:
                    break
            self._check_end(message)
            is_done = True
        finally:
            if not is_done:
                self.close()

    def _serve(self, fetch: Fetch, wanted: Mapping[str, Any]) -> None:
        try:
            found = fetch(wanted)
        except OSError as error:
            self._send({"error": str(error)}, b"")
        else:
            self._send({}, found)

    def _check_end(self, message: Mapping[str, Any]) -> None:
        if message["end"] == "memory":
            raise ChildOutOfMemory(f"took more than {self._memory_bytes >> 20} MiB of memory")
        if message["end"] == "raised":
            raise ChildFailed(f"raised {message['error']}")

    def _send(self, message: Mapping[str, Any], body: bytes) -> None:
        try:
            frames.send(self._channel, message, body, BEGIN_LIMIT_S)
        except OSError:
            raise self._died() from None

    def _receive(self, limit_s: float) -> tuple[dict[str, Any], bytearray]:
        try:
            return frames.receive(self._channel, _MESSAGE_TIMES * self._memory_bytes, limit_s)
        except frames.TooLate:
            raise ChildTooSlow(f"went on for more than {limit_s:g} s") from None
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> ChildDied:
        self.close()
        return ChildDied(f"ended its process with {self._process.returncode}")

    def kill(self) -> None:
        """End it, whatever it is at; for any thread."""
        self._process.kill()

    def close(self) -> None:
        """End it and forget it; may be called more than once."""
        self.kill()
        self._process.wait()
        self._channel.close()
