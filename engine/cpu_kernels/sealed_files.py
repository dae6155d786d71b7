"""Checksums at the end of kept machine code, so that a damaged file is not run.

Numba's files are pickles, and what follows a pickle is not read: the checksum stands there, and comes with
the file or not at all. Whoever damages a file on purpose can seal it too; `private_folder` is against those.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

SUFFIXES = (".nbi", ".nbc")  # Numba's indexes, and the machine code
SEAL = hashlib.sha256().digest_size


def seal_files(folder: Path) -> None:
    """Give each file below the folder its checksum, where it has none. Raises OSError.

    Each is replaced by its sealed copy in one step: another process reads the one or the other.
    """
    for path in _kept(folder):
        with suppress(FileNotFoundError):  # another process found it without a seal
            contents = path.read_bytes()
            if not _is_sealed(contents):
                _replace(path, contents + hashlib.sha256(contents).digest())


def remove_damaged(folder: Path) -> list[Path]:
    """Remove what does not match its checksum, or has none; return the paths. Raises OSError."""
    damaged = []
    for path in _kept(folder):
        with suppress(FileNotFoundError):
            if not _is_sealed(path.read_bytes()):
                path.unlink()
                damaged.append(path)
    return damaged


def _kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def _is_sealed(contents: bytes) -> bool:
    return hashlib.sha256(contents[:-SEAL]).digest() == contents[-SEAL:]


def _replace(path: Path, contents: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
