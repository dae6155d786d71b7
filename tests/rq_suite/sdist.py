"""RQ's own tests, fetched by pip out of the sdist of the installed version; never kept in the repository."""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

FETCH_TIMEOUT_S = 240


class CannotFetch(Exception):
    """pip could not download the sdist; says why."""


def rq_tests() -> Path:
    """Return a folder with RQ's `tests` and `pyproject.toml`, or raise CannotFetch."""
    release = version("rq")
    kept = _cache() / f"rq-{release}"
    if not (kept / "tests" / "__init__.py").exists():
        _fetch(release, kept)
    return kept


def rq_2() -> Path:
    """A folder to import RQ 2.12 from, apart from the RQ of the environment. Raises CannotFetch."""
    kept = _cache() / "rq-2"
    if not (kept / "rq" / "__init__.py").exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept.parent) as folder:
            new = Path(folder) / "new"
            pip("install", "--quiet", "--no-deps", "--target", str(new), "rq==2.12.0")
            if not kept.exists():
                new.rename(kept)
    return kept


def _cache() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill" / "rq_suite"
    )


def _fetch(release: str, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=kept.parent) as folder:
        wanted = ["--no-binary", ":all:", "--no-deps", "--dest", folder, f"rq=={release}"]
        pip("download", *wanted)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        unpacked = Path(folder) / f"rq-{release}"
        new = Path(folder) / "new"
        new.mkdir()
        for name in ("tests", "pyproject.toml"):
            (unpacked / name).rename(new / name)
        if not kept.exists():
            new.rename(kept)


def pip(*arguments: str) -> None:
    """Run a command of pip. Raises CannotFetch with its last line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CannotFetch(f"pip {arguments[0]} did not end within {FETCH_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip() or error.stdout.strip() or "nothing").splitlines()[-1]
        raise CannotFetch(f"pip {arguments[0]} failed: {said}") from error
