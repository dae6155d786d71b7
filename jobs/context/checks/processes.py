"""Checks: asks processes apart whether answers are valid, each within a limit of time.

A pattern that backtracks holds Python's lock while it does, and a user's function may do anything: in the
worker's own process either would hold up its engine.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from ...errors import InvalidJob
from .options import RepairOptions

#: Seconds that one check may take.
DEFAULT_LIMIT_S = 5.0

#: The same of a process until it has begun and imported what a check needs.
BEGIN_LIMIT_S = 60.0

#: How much later a process ends by itself, where nobody has ended it.
_MARGIN_S = 5.0

_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from jobs.context.checks.child import main; main()"
)


class _NoReply(Exception):
    """Raised with what became of a process that was asked."""


class _Process:
    """One process that checks. All methods are called from one thread at a time."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        # A session of its own: what interrupts the worker from its terminal is not meant for it.
        self._child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._stdin, self._stdout = self._child.stdin, self._child.stdout

    def ask(self, limit_s: float, **question: Any) -> dict[str, Any]:
        """Return the reply. Raises _NoReply; the process is of no use then."""
        line = json.dumps({**question, "limit_s": limit_s + _MARGIN_S}).encode() + b"\n"
        until = time.monotonic() + limit_s
        reply = bytearray()
        try:
            while line:
                line = line[self._stdin.write(line) or 0 :]
        except OSError:
            raise _NoReply(self._end()) from None
        while not reply.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._stdout], [], [], left)[0]:
                raise _NoReply(f"went on for more than {limit_s:g} s")
            part = os.read(self._stdout.fileno(), 1 << 16)
            if not part:
                raise _NoReply(self._end())
            reply += part
        found: dict[str, Any] = json.loads(reply)
        return found

    def _end(self) -> str:
        self.close()
        return f"ended its process with {self._child.returncode}"

    def close(self) -> None:
        """End the process; may be called more than once."""
        self._stdin.close()
        self._child.kill()
        self._child.wait()
        self._stdout.close()


class Checks:
    """What a worker process checks answers with. Thread-safe; as many processes as threads that ask at once.

    allowed: exact dotted names of the functions that may be called. limit_s: seconds that a check may take.
    """

    def __init__(self, allowed: Collection[str] = (), limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._allowed, self._limit_s = frozenset(allowed), limit_s
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._is_closed = False

    def admit(self, options: RepairOptions) -> None:
        """Raise InvalidJob for a function that may not be called here; nothing is imported."""
        name = options.function
        if name is None or name in self._allowed:
            return
        near = get_close_matches(name, self._allowed, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "its operator lists it in TOKENMILL_ALLOWED_FUNCTIONS"
        raise InvalidJob(f"function of check: {name} is not allowed on this worker: {hint}")

    def prepare(self, options: RepairOptions) -> None:
        """Raise InvalidJob for a check that can check nothing. It may take as long as an import."""
        self.admit(options)
        if options.check is not None:
            try:
                self._ask(options)
            except _NoReply as error:
                raise InvalidJob(f"the check {error} before it could check anything") from None

    def reason(self, options: RepairOptions, row: Any, text: str) -> str | None:
        """Return why an answer's text is not valid, None where it is. Raises InvalidJob as `prepare`.

        row: what a function gets, as JSON has it.
        """
        self.admit(options)
        try:
            reply = self._ask(options, row=row, text=text)
        except _NoReply as error:
            return f"the check {error}"
        reason: str | None = reply["reason"]
        return reason

    def _ask(self, options: RepairOptions, **answer: Any) -> dict[str, Any]:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process()
        try:
            reply: dict[str, Any] = {}
            if options.check_text not in process.known:
                reply = process.ask(BEGIN_LIMIT_S, check=options.check_text)
            if "problem" not in reply:
                process.known.add(options.check_text)
                if answer:
                    reply = process.ask(self._limit_s, check=options.check_text, **answer)
        except BaseException:
            process.close()
            raise
        self._keep(process)
        if "problem" in reply:
            raise InvalidJob(reply["problem"])
        return reply

    def _keep(self, process: _Process) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.close()

    def close(self) -> None:
        """End the processes; one that is asked ends once it has replied."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.close()
