"""A folder that no other user may write to: what lies in it is run as machine code."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make the folder, and what is missing above it, for this user alone. Raises OSError."""
    for path in [*reversed(folder.parents), folder]:
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def close_to_others(folder: Path) -> None:
    """Take from all others the right to write what this process has put below the folder."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process' temporary file
            path.chmod(0o700 if path.is_dir() else 0o600)


def exposure(folder: Path) -> str | None:
    """Say which path another user may have written: below the folder, itself, or above it. None: no path.

    folder: without links, as `Path.resolve` gives it.
    """
    for path in (*folder.parents, folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            if problem := _problem(path.lstat(), sticky_will_do=path in folder.parents):
                return f"{path} {problem}"
    return None


def _problem(found: os.stat_result, *, sticky_will_do: bool) -> str | None:
    """In a folder with the sticky bit, such as /tmp, nobody can replace what belongs to another."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_mode & 0o022 and not (sticky_will_do and found.st_mode & stat.S_ISVTX):
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None
