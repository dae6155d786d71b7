"""Findings: what a check has found and what mends it; checks of the installation."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple


class Level(StrEnum):
    """A finding's weight. fault: work fails, or is lost."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Finding(NamedTuple):
    """subject: what was looked at. found: what is there. mend: the command or setting that mends it."""

    level: Level
    subject: str
    found: str
    mend: str = ""


ok, warning, fault = (partial(Finding, level) for level in Level)


def told(subject: str, error: str) -> Finding:
    """Return the fault that the text of one of our errors tells: "found (why): mend" or "found; mend"."""
    found, *mend = re.split(r"(?<=\)): |; ", error, maxsplit=1)
    return fault(subject, found, "".join(mend))


class Examination(NamedTuple):
    """Some checks. check: gives what it finds, one after the other. limit_s: what it may take."""

    subject: str
    check: Callable[[], Iterable[Finding]]
    limit_s: float = 30.0


def examine(examinations: Iterable[Examination]) -> Iterator[Finding]:
    """Carry examinations out one after the other. One that takes too long, or raises, is a fault."""
    for each in examinations:
        found: list[Finding] = []
        # A call of the system that hangs, on a network mount for example, cannot be ended: it is left behind.
        thread = threading.Thread(target=_examine, args=(each, found), daemon=True)
        thread.start()
        thread.join(each.limit_s)
        if thread.is_alive():
            found = [
                *found,
                fault(
                    each.subject,
                    f"no answer within {each.limit_s:g} s",
                    "find out what it waits for",
                ),
            ]
        yield from found


def _examine(examination: Examination, found: list[Finding]) -> None:
    try:
        for each in examination.check():
            found.append(each)
    except Exception as error:  # noqa: BLE001  # a check that cannot be made must not hide the others
        text = f"it cannot be checked ({type(error).__name__}: {error})"
        found.append(fault(examination.subject, text, "mend what the error names, then look again"))


#: Variable of RQ's -> the classes that it may name.
CLASSES = {
    "RQ_JOB_CLASS": ("rq.job.Job",),
    "RQ_WORKER_CLASS": ("worker.BatchWorker", "tokenmill.BatchWorker"),
}


def check_installation() -> Iterator[Finding]:
    """Check RQ's settings, and name the versions that are installed."""
    for name, expected in CLASSES.items():
        given = os.environ.get(name)
        if given is not None and given not in expected:
            yield warning(
                "settings", f"{name}={given!r}, expected {' or '.join(expected)}", f"unset {name}"
            )
    yield ok(
        "installation",
        f"Tokenmill {version('tokenmill')}, rq {version('rq')}, redis-py {version('redis')}",
    )


#: Packages without which a worker or dashboard runs too, slower or with less to see.
OPTIONAL = frozenset(
    {"hiredis", "numba", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"}
)


def missing(extra: str) -> Iterator[Finding]:
    """Name the packages of an extra that are not installed."""
    for each in requires("tokenmill") or ():
        requirement, _, condition = each.partition(";")
        name = re.split(r"[\[<>=!~ ]", "hiredis" if "[hiredis]" in requirement else requirement)[0]
        try:
            version(name if extra in condition else "rq")
        except PackageNotFoundError:
            weigh = warning if name in OPTIONAL else fault
            yield weigh(
                "installation", f"{name} is not installed", f"pip install 'tokenmill[{extra}]'"
            )
