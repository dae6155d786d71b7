"""Findings: what a check has found and what mends it; checks of the installation."""

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from jobs.common.version import code_version


class Level(StrEnum):
    """A finding's weight. fault: work fails, or is lost."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Finding(NamedTuple):
    """subject: what was looked at. found: what is there. mend: the command or setting that mends it."""

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
    """Return the fault that one of our errors tells: "found (why): mend" or "found; mend"."""
    found, *mend = re.split(r"(?<=\)): |; ", str(error), maxsplit=1)
    return fault(subject, found, "".join(mend))


class Examination(NamedTuple):
    """Some checks. check: gives what it finds, one after the other. limit_s: what it may take."""

    subject: str
    check: Callable[[], Iterable[Finding]]
    limit_s: float


def examine(examinations: Iterable[Examination]) -> Iterator[Finding]:
    """Carry them out one after the other; what does not end in its time, or ends by an error, is a fault."""
    for each in examinations:
        found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()
        # A call of the system that hangs, on a network mount for example, cannot be ended: it is left behind.
        threading.Thread(target=_run, args=(each, found.put), daemon=True).start()
        until = time.monotonic() + each.limit_s
        try:
            while (finding := found.get(timeout=max(0.0, until - time.monotonic()))) is not None:
                yield finding
        except queue.Empty:
            yield fault(each.subject, f"no answer within {each.limit_s:g} s", "find out what it waits for")


def _run(examination: Examination, put: Callable[[Finding | None], None]) -> None:
    try:
        for each in examination.check():
            put(each)
    except Exception as error:  # noqa: BLE001  # a check that cannot be made must not hide the others
        text = f"it cannot be checked ({type(error).__name__}: {error})"
        put(fault(examination.subject, text, "mend what the error names, then look again"))
    put(None)


#: Variables of RQ, with what a worker of ours needs where they are set.
VARIABLES = {"RQ_JOB_CLASS": "rq.job.Job", "RQ_WORKER_CLASS": "worker.BatchWorker"}


def check_installation() -> Iterator[Finding]:
    """Look at variables, and tell versions."""
    for name, expected in VARIABLES.items():
        if (given := os.environ.get(name, expected)) != expected:
            yield warning("settings", f"{name}={given!r}, expected {expected}", f"unset {name}")
    yield ok("installation", f"Tokenmill {code_version()}, rq {installed('rq')}, redis-py {installed('redis')}")


def missing(names: Mapping[str, str], extra: str) -> Iterator[Finding]:
    """Name the distributions that are not installed. names: each with what it is for."""
    for name, purpose in names.items():
        if installed(name) is None:
            mend = f"pip install 'tokenmill[{extra}]'"
            yield fault("installation", f"{name} is not installed, {purpose}", mend)


def installed(name: str) -> str | None:
    """Return a distribution's version, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
