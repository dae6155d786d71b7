"""Findings of the doctor, each with a remedy, and checks of the installation."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple


class Level(StrEnum):
    """How serious a finding is. A FAULT makes work fail, or loses it."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Finding(NamedTuple):
    """What a check reports. subject: what was checked. text: what was found. mend: what to do about it, if anything."""

    level: Level
    subject: str
    text: str
    mend: str = ""


ok = partial(Finding, Level.OK)
warning = partial(Finding, Level.WARNING)
fault = partial(Finding, Level.FAULT)


def fault_from_text(subject: str, error: str) -> Finding:
    """Split the text of one of our errors into problem and remedy, and return them as a fault.

    The text has the form "problem (why): remedy" or "problem; remedy". Any other text is a problem without a remedy.
    """
    separator = re.search(r"(?<=\)): |; ", error)
    if separator is None:
        return fault(subject, error, "")
    return fault(subject, error[: separator.start()], error[separator.end() :])


class Examination(NamedTuple):
    """Checks of one subject. check: makes them, and yields their findings. limit_s: the most seconds for all checks."""

    subject: str
    check: Callable[[], Iterable[Finding]]
    limit_s: float = 30.0


def examine(examinations: Iterable[Examination]) -> Iterator[Finding]:
    """Carry out examinations in turn, and yield their findings.

    An examination that takes too long, or raises, yields a fault after its other findings.
    """
    for examination in examinations:
        findings: list[Finding] = []
        # A thread whose system call hangs, for example on a network mount, cannot be ended. It is left behind.
        thread = threading.Thread(target=_examine, args=(examination, findings), daemon=True)
        thread.start()
        thread.join(examination.limit_s)
        if thread.is_alive():
            yield from list(findings)  # a copy, because the thread may still add to them
            problem = f"no answer within {examination.limit_s:g} s"
            yield fault(examination.subject, problem, "find out what it waits for")
        else:
            yield from findings


def _examine(examination: Examination, findings: list[Finding]) -> None:
    """Carry out an examination. Add its findings one by one, so that they are not lost if the examination hangs."""
    try:
        for finding in examination.check():
            findings.append(finding)
    except Exception as error:  # noqa: BLE001  # a check that raises must not hide other findings
        problem = f"it cannot be checked ({type(error).__name__}: {error})"
        remedy = "mend what the error names, then look again"
        findings.append(fault(examination.subject, problem, remedy))


#: The values that are expected in RQ's environment variables for classes.
CLASSES = {
    "RQ_JOB_CLASS": ("rq.job.Job",),
    "RQ_WORKER_CLASS": ("worker.BatchWorker", "tokenmill.BatchWorker"),
}


def check_installation() -> Iterator[Finding]:
    """Yield findings about RQ's settings, and about the installed versions."""
    for name, expected in CLASSES.items():
        value = os.environ.get(name)
        if value is not None and value not in expected:
            problem = f"{name}={value!r}, expected {' or '.join(expected)}"
            yield warning("settings", problem, f"unset {name}")
    yield ok(
        "installation",
        f"Tokenmill {version('tokenmill')}, rq {version('rq')}, redis-py {version('redis')}",
    )


#: Packages that are not needed. Without them a worker is slower, or a dashboard shows less.
OPTIONAL = frozenset(
    {"hiredis", "numba", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"}
)


def missing_packages(extra: str) -> Iterator[Finding]:
    """Yield a finding for each package of an extra that is not installed."""
    for line in requires("tokenmill") or ():
        # A line looks like `numpy>=2.0; extra == "worker"`.
        requirement, _, condition = line.partition(";")
        if extra not in condition:
            continue
        name = re.split(r"[\[<>=!~ ]", requirement)[0]
        if "[hiredis]" in requirement:
            name = "hiredis"  # the line is `redis[hiredis]`, and redis itself is always installed
        try:
            version(name)  # raises for a package that is not installed
        except PackageNotFoundError:
            level = Level.WARNING if name in OPTIONAL else Level.FAULT
            yield Finding(
                level,
                "installation",
                f"{name} is not installed",
                f"pip install 'tokenmill[{extra}]'",
            )
