"""Whether what is installed fits together, and what this process is allowed."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..common.version import code_version
from .findings import Finding, fault, ok, warning

#: Versions that this code knows: at least, and below. As in pyproject.toml.
VERSIONS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "rq": ((3,), (4,)),
    "redis": ((6,), None),
}

#: Files and sockets that a process of ours should be allowed at least.
MIN_DESCRIPTORS = 1024


def check_installation(import_path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Look at versions, at other packages of our names, and at limits. import_path: by default sys.path."""
    for name, (least, below) in VERSIONS.items():
        found = installed(name)
        wanted = f"{'.'.join(map(str, least))} or later" + (
            f", before {'.'.join(map(str, below))}" if below else ""
        )
        if found is None or numbers(found) < least or (below is not None and numbers(found) >= below):
            bound = f",<{'.'.join(map(str, below))}" if below else ""
            mend = f"pip install '{name}>={'.'.join(map(str, least))}{bound}'"
            yield fault("installation", f"{name} {found or 'is missing'}, expected {wanted}", mend)
    yield from _other_packages(sys.path if import_path is None else import_path)
    yield from _descriptors()
    found = f"Tokenmill {code_version()}, rq {installed('rq')}, redis-py {installed('redis')}"
    yield ok("installation", f"{found}, Python {sys.version.split()[0]}")


def missing(names: Mapping[str, str], extra: str) -> Iterator[Finding]:
    """Name the distributions that are not installed. names: each with what it is for."""
    for name, purpose in names.items():
        if installed(name) is None:
            mend = f"pip install 'tokenmill[{extra}]'"
            yield fault("installation", f"{name} is not installed, {purpose}", mend)


def installed(name: str) -> str | None:
    """Return a distribution's version, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    return tuple(int(each) for each in re.findall(r"\d+", text.partition("+")[0])[:3])


def _other_packages(import_path: Sequence[str]) -> Iterator[Finding]:
    """Another `jobs` before ours is what a worker would import, and run."""
    mend = "give that module another name, or take its folder from the import path (PYTHONPATH, rq's --path)"
    here = os.getcwd()
    for folder in import_path:
        if other := _foreign(folder or here):
            yield fault("installation", f"{other} is another module named jobs, imported before ours", mend)
            return
        if _is_ours(folder or here):
            break
    if other := _foreign(here):  # our workers leave it out; RQ's own commands do not
        yield warning(
            "installation", f"{other} is another module named jobs, which RQ's worker imports", mend
        )


def _foreign(folder: str) -> Path | None:
    places = (Path(folder) / "jobs" / "__init__.py", Path(folder) / "jobs.py")
    return next((each for each in places if each.is_file() and not _is_ours(folder)), None)


def _is_ours(folder: str) -> bool:
    return (Path(folder) / "jobs").resolve() == Path(__file__).parents[1].resolve()


def _descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_DESCRIPTORS:
        mend = f"ulimit -n {MIN_DESCRIPTORS} (LimitNOFILE= of systemd); the hard limit is {hard}"
        yield warning("installation", f"only {soft} files and sockets may be open at a time", mend)
