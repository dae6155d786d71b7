"""What a check has found, and what is to be done about it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """How bad it is. fault: work fails, or is lost."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """subject: what was looked at, in a word. found: what is there. mend: what to do, the command or setting
    itself where there is one."""

    subject: str
    level: Level
    found: str
    mend: str = ""


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, Level.OK, found)


def warning(subject: str, found: str, mend: str) -> Finding:
    return Finding(subject, Level.WARNING, found, mend)


def fault(subject: str, found: str, mend: str) -> Finding:
    return Finding(subject, Level.FAULT, found, mend)


def told(subject: str, error: Exception) -> Finding:
    """Return the fault that one of our errors tells, which ends with what to do: "found (why): mend" or
    "found; mend"."""
    text = str(error)
    found, reason, mend = text.partition("): ")
    if not reason:
        found, _, mend = text.rpartition("; ")
    return fault(subject, f"{found}{reason[:1]}", mend) if found and mend else fault(subject, text, "")


class Examination(NamedTuple):
    """One room of checks. check: gives what it finds, one after the other. limit_s: what it may take."""

    subject: str
    check: Callable[[], Iterable[Finding]]
    limit_s: float


#: Ends what an examination's thread hands over.
_END = object()


def examine(examinations: Iterable[Examination]) -> Iterator[Finding]:
    """Carry them out one after the other; what does not end in its time, or ends by an error, is a fault."""
    for examination in examinations:
        yield from _examine(examination)


def _examine(examination: Examination) -> Iterator[Finding]:
    subject, check, limit_s = examination
    found: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            for each in check():
                found.put(each)
        except Exception as error:  # noqa: BLE001  # a check that cannot be made must not hide the others
            text = f"it cannot be checked ({type(error).__name__}: {error})"
            found.put(fault(subject, text, "mend what the error names, then look again"))
        found.put(_END)

    # A call of the system that hangs, on a network mount for example, cannot be ended: it is left behind.
    threading.Thread(target=run, name=f"doctor-{subject}", daemon=True).start()
    until = time.monotonic() + limit_s
    while True:
        try:
            each = found.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            yield fault(subject, f"no answer within {limit_s:g} s", "find out what it waits for")
            return
        if each is _END:
            return
        assert isinstance(each, Finding)
        yield each
