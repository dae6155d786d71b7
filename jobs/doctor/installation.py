"""Whether what is installed fits together, and whether RQ's variables stand in the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jobs.common.version import code_version
from jobs.doctor.findings import Finding, fault, ok, warning

#: Variables of RQ, with what a worker of ours needs where they are set.
VARIABLES = {"RQ_JOB_CLASS": "rq.job.Job", "RQ_WORKER_CLASS": "worker.BatchWorker"}


def check_installation(
    import_path: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Look for other packages of our name, and at variables. import_path: by default sys.path."""
    for folder in sys.path if import_path is None else import_path:
        places = (Path(folder or ".") / "jobs", Path(folder or ".") / "jobs.py")
        found = next((each for each in places if each.exists()), None)
        if found is not None and found.resolve() != Path(__file__).parents[1]:
            mend = "give it another name, or take its folder from the import path (PYTHONPATH, rq's --path)"
            yield fault("installation", f"{found} is another module named jobs, imported before ours", mend)
        if found is not None:
            break
    for name, expected in VARIABLES.items():
        if (given := environ.get(name, expected)) != expected:
            yield warning("settings", f"{name}={given!r}, expected {expected}", f"unset {name}")
    yield ok(
        "installation", f"Tokenmill {code_version()}, rq {installed('rq')}, redis-py {installed('redis')}"
    )


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
