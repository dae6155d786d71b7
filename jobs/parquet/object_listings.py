"""Listings of object stores, each made by a process apart, which a store cannot fill or keep for ever."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from obstore import exceptions

from .store_errors import StoreRefused

_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from jobs.parquet.listing_child import main; main(int(sys.argv[2]))"
)

#: Seconds that a process may take to begin.
_BEGIN_S = 60.0

#: What obstore reads of the environment.
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")


class _Child:
    """One process that lists, for one thread at a time."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKIO_WORKER_THREADS": "2"},  # each takes memory that listings shall have
                start_new_session=True,
            )
        self._reply(_BEGIN_S)

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the reply; None where it has taken too long or too much, and the process is ended."""
        with suppress(OSError):  # it has ended: that it does not reply says so
            self._pipe.send_bytes(json.dumps(question).encode())
        return self._reply(timeout_s)

    def _reply(self, timeout_s: float) -> dict[str, Any] | None:
        with suppress(EOFError, OSError):
            if self._pipe.poll(timeout_s):
                reply: dict[str, Any] = json.loads(self._pipe.recv_bytes())
                return reply
        self.close()
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


#: Processes that wait for a question. Shared by all threads.
_idle: list[_Child] = []


def listed(kind: str, folder: str, timeout_s: float) -> Any:
    """Return what a listing of a kind tells of a prefix, a path as run_path returns it.

    Raises what obstore does, and StoreRefused for a listing without an end.
    """
    scheme, _, rest = folder.partition("://")
    bucket, _, key = rest.partition("/")
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    question = {
        "kind": kind, "scheme": scheme, "bucket": bucket, "key": key, "timeout_s": timeout_s,
        "environment": variables,
    }  # fmt: skip
    try:
        child = _idle.pop()
    except IndexError:
        child = _Child()
    try:
        reply = child.ask(question, timeout_s)
    except BaseException:  # an interrupt: its reply would be the next one's
        child.close()
        raise
    if reply is None:
        raise StoreRefused(
            folder, f"its listing does not end within {timeout_s:g} s, or takes more memory than one may"
        )
    _idle.append(child)
    if "raised" in reply:
        raise getattr(exceptions, reply["raised"], ValueError)(reply["text"])
    return reply["found"]


@atexit.register
def _close_all() -> None:
    while _idle:
        _idle.pop().close()
