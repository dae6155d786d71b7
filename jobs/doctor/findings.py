"""Findings: what a check has found and what mends it; checks of the installation, and of the data roots."""

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

from jobs.errors import DiskFull, JobsError, OutputNotWritable
from jobs.runs.plans.paths import is_stored, real_path, run_path


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
    """Carry them out one after the other; what does not end in its time, or ends by an error, is a fault."""
    for each in examinations:
        found: list[Finding] = []
        # A call of the system that hangs, on a network mount for example, cannot be ended: it is left behind.
        thread = threading.Thread(target=_examine, args=(each, found), daemon=True)
        thread.start()
        thread.join(each.limit_s)
        if thread.is_alive():
            found = [*found, fault(each.subject, f"no answer within {each.limit_s:g} s", "find out what it waits for")]
        yield from found


def _examine(examination: Examination, found: list[Finding]) -> None:
    try:
        for each in examination.check():
            found.append(each)
    except Exception as error:  # noqa: BLE001  # a check that cannot be made must not hide the others
        text = f"it cannot be checked ({type(error).__name__}: {error})"
        found.append(fault(examination.subject, text, "mend what the error names, then look again"))


def check_installation() -> Iterator[Finding]:
    for name, expected in (("RQ_JOB_CLASS", "rq.job.Job"), ("RQ_WORKER_CLASS", "worker.BatchWorker")):
        if (given := os.environ.get(name, expected)) != expected:
            yield warning("settings", f"{name}={given!r}, expected {expected}", f"unset {name}")
    yield ok("installation", f"Tokenmill {version('tokenmill')}, rq {version('rq')}, redis-py {version('redis')}")


#: Packages without which a worker or dashboard runs too, slower or with less to see.
OPTIONAL = frozenset({"hiredis", "numba", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"})


def missing(extra: str) -> Iterator[Finding]:
    for each in requires("tokenmill") or ():
        requirement, _, condition = each.partition(";")
        name = re.split(r"[\[<>=!~ ]", "hiredis" if "[hiredis]" in requirement else requirement)[0]
        try:
            version(name if extra in condition else "rq")
        except PackageNotFoundError:
            weigh = warning if name in OPTIONAL else fault
            yield weigh("installation", f"{name} is not installed", f"pip install 'tokenmill[{extra}]'")


#: With less free space no run fits; seconds for a store, of which each request has a quarter.
MIN_BYTES, STORE_TIMEOUT_S = 64 << 20, 20.0


def check_places(roots: Sequence[str]) -> Iterator[Finding]:
    """Try in each root what a run does there. One that only holds inputs may be closed to a worker."""
    found = [_look(real_path(run_path(os.path.expanduser(root)))) for root in roots]
    is_closed = all(each.mend for each in found)
    yield from (each if is_closed or not each.mend else warning(each.subject, each.found, each.mend) for each in found)


def _look(root: str) -> Finding:
    from jobs.parquet.files.storage import Storage, writing  # pyarrow: where a worker is installed

    if not is_stored(root) and not os.path.isdir(root):
        return fault("files", f"{root} is no folder", f"create it, or correct TOKENMILL_DATA_ROOTS: mkdir -p {root}")
    try:
        with writing(root):
            Storage((root,), timeout_s=STORE_TIMEOUT_S).make_folder(root)  # a store is tried by that
            if not is_stored(root):
                with tempfile.TemporaryFile(dir=root) as file:
                    file.write(b"probe")
    except (DiskFull, OutputNotWritable) as error:
        mend = "give this user the right to write there (chown, chmod, no `ro` mount), or free space"
        return fault("files", f"{root} cannot be written to ({error.args[1]})", mend)
    except JobsError as error:
        return told("files", str(error))
    if not is_stored(root) and shutil.disk_usage(root).free < MIN_BYTES:
        mend = "remove what is not needed there, or let runs write elsewhere (TOKENMILL_DATA_ROOTS)"
        return fault("files", f"{root}: its disk is full, no part of a run fits", mend)
    return ok("files", f"{root} can be written to")
