"""The few file operations a run needs, on local files below the data roots.

An object store would be another class with these methods: `publish` is its conditional put.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileType, LocalFileSystem

from ..errors import CorruptParquet, DiskFull, InputNotFound, OutputNotWritable, PathOutsideRoots
from .paths import local_path

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SIZE_ASKED = re.compile(r"of size (\d+)")  # pyarrow's error has no other place for it
_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_NOT_WRITABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}


@dataclass(frozen=True)
class FileStat:
    """What tells one state of a file from another: size in bytes, modification time in nanoseconds."""

    size: int
    mtime_ns: int


class Storage:
    """Local files. Every method takes the real paths that `resolve` returned.

    Whoever may write below the roots could still swap a folder for a symlink between `resolve` and the
    use of its path: that is not defended against.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = tuple(os.path.realpath(root) for root in roots)
        self._files = LocalFileSystem()

    def resolve(self, path: str) -> str:
        """Return the absolute path without symlinks and `..`. Raises PathOutsideRoots."""
        real = os.path.realpath(local_path(path))
        if not any(real == root or real.startswith(root.rstrip("/") + "/") for root in self._roots):
            raise PathOutsideRoots(path, ":".join(self._roots))
        return real

    def expand(self, pattern: str) -> list[tuple[str, str]]:
        """Return what a glob names, sorted: each path as it matched, and its real path.

        Raises PathOutsideRoots if one leads outside.
        """
        fixed = pattern[: min(pattern.index(char) for char in glob_chars(pattern))]
        self.resolve(os.path.dirname(fixed))  # nothing outside the roots is even listed
        return [(path, self.resolve(path)) for path in sorted(glob.glob(pattern, recursive=True))]

    def stat(self, path: str) -> FileStat | None:
        """Return the state of a regular file, None for anything else: a FIFO would block its reader."""
        info = self._files.get_file_info(path)
        return FileStat(info.size, info.mtime_ns) if info.type == FileType.File else None

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)  # pyarrow takes no name that is not UTF-8

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder."""
        return sorted(os.listdir(folder))

    def make_folder(self, path: str) -> None:
        self._files.create_dir(path, recursive=True)

    def open_input(self, path: str) -> Any:
        return self._files.open_input_file(path)

    def open_output(self, path: str) -> Any:
        return self._files.open_output_stream(path)

    def publish(self, temporary: str, target: str) -> bool:
        """Put a written file in its place without replacing; return False if the place was taken.

        The contents reach the disk before the name does: a part that is there is whole.
        """
        try:
            self._sync(temporary)
            os.link(temporary, target)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # Whoever finished the run removed leftovers, this file among them; that needs a published target.
            if not os.path.exists(target):
                raise
            return False
        self._sync(os.path.dirname(target))
        return True

    def replace(self, temporary: str, target: str) -> bool:
        """Put a written file in its place, over what was there; return False if someone removed it first."""
        try:
            self._sync(temporary)
            os.replace(temporary, target)
        except FileNotFoundError:
            return False
        self._sync(os.path.dirname(target))
        return True

    def delete(self, path: str) -> None:
        """Remove a file that may already be gone."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def _sync(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def glob_chars(pattern: str) -> set[str]:
    """Return the characters that make a path a glob; empty for a plain path."""
    return set("*?[") & set(pattern)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Name the file in what goes wrong while it is read. Raises InputNotFound or CorruptParquet.

    A lack of memory passes as it is, unless the file asks for more than this machine has in all.
    """
    try:
        yield
    except pa.ArrowMemoryError as error:
        if not _is_absurd(error):
            raise
        raise CorruptParquet(path, _first_line(error)) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise CorruptParquet(path, _first_line(error)) from error
    except OSError as error:
        if error.errno in _NO_SUCH_FILE:
            raise InputNotFound(path) from None
        if error.errno is not None:
            raise
        raise CorruptParquet(path, _first_line(error)) from error  # how pyarrow reports broken pages


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Name the file in what goes wrong while it is written. Raises DiskFull or OutputNotWritable."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else _first_line(error)
        if error.errno in _DISK_FULL:
            raise DiskFull(path, reason) from error
        if error.errno in _NOT_WRITABLE:
            raise OutputNotWritable(path, reason) from error
        raise


def _is_absurd(error: pa.ArrowMemoryError) -> bool:
    """Whether pyarrow tried to take more than all the machine's memory: a size that a broken file names."""
    size = _SIZE_ASKED.search(str(error))
    return size is not None and int(size[1]) > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
