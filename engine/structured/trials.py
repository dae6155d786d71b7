"""Trials: tries each form that is new in a process apart, before this one compiles it.

A form is the producer's, and llguidance follows it on the thread's stack: one of 100 KB can overrun any. In
the engine's process that would be the end of all that it serves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from threading import Lock
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.structured_outputs import NAME, NAMES, StructuredOutputsParams
from engine.structured.compiler import unusable

#: Seconds that a form may take.
LIMIT_S = 5.0

#: The same of a process until it has begun and read the vocabulary.
BEGIN_LIMIT_S = 60.0

#: How much later a process ends by itself, where nobody has ended it.
_MARGIN_S = 5.0

_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.structured.trial_child import main; main(int(sys.argv[2]))"
)


class NotTried(InvalidSampling):
    """Raised when there is no process in which a form could be tried: no fault of the form's."""


class _NoReply(Exception):
    """Raised with what became of a process that was asked."""


class _Child:
    """One process that tries forms, for one thread at a time. Raises _NoReply; then it is of no use."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            # A session of its own: what interrupts the engine from its terminal is not meant for it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.ask(BEGIN_LIMIT_S, vocabulary)

    def ask(self, limit_s: float, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._pipe.send_bytes(json.dumps(question).encode())
            if not self._pipe.poll(limit_s):
                self.close()
                raise _NoReply(f"took longer than {limit_s:g} s to compile")
            reply: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self.close()
            raise _NoReply(f"ended the process that compiled it ({self._process.returncode})") from None
        return reply

    def kill(self) -> None:
        """End it, whatever it is at; for any thread."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._pipe.close()


class Trials:
    """As many processes as threads that ask at once. vocabulary: the arguments of their Compiler."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._is_closed = False

    def grammar_of(self, spec: StructuredOutputsParams) -> str:
        """The grammar of a form that has survived being compiled. Raises InvalidSampling, or NotTried."""
        child = self._take()
        form = {name: value for name in NAMES if (value := getattr(spec, name)) is not None}
        try:
            reply = child.ask(LIMIT_S, {"form": form, "limit_s": LIMIT_S + _MARGIN_S})
        except _NoReply as error:
            with self._lock:
                self._busy.discard(child)
            raise unusable(spec, f"that {error}") from None
        self._keep(child)
        if "refused" in reply:
            raise InvalidSampling(*reply["refused"])
        return str(reply["grammar"])

    def _take(self) -> _Child:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        try:
            child = child or _Child(self._vocabulary)
        except (_NoReply, OSError) as error:
            raise NotTried(f"{NAME} cannot be compiled here: no process for it begins", str(error)) from None
        with self._lock:
            self._busy.add(child)
            if self._is_closed:
                child.kill()
        return child

    def _keep(self, child: _Child) -> None:
        with self._lock:
            self._busy.discard(child)
            if not self._is_closed:
                self._idle.append(child)
                return
        child.close()

    def close(self) -> None:
        """End the processes; who asks one learns that it has ended."""
        with self._lock:
            self._is_closed = True
            for child in self._busy:
                child.kill()
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()
