"""Offers the few file operations that a run needs below the data roots. Turns their errors into named errors."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Self

import pyarrow as pa

from jobs import errors
from jobs.context import JobContext, never_interrupted
from jobs.context.shared_files import DEFAULT_BYTES
from jobs.parquet.files.filesystem import Entry, FileStat
from jobs.parquet.files.local_files import LocalFiles
from jobs.runs.plans.names import temporary_name
from jobs.runs.plans.paths import is_stored, run_path
from sandbox.exhausted import DISK_FULL

try:
    from jobs.parquet.files.object_files import ObjectFiles
except ImportError:  # obstore is not installed: the extra `cloud` brings it
    ObjectFiles = None  # type: ignore[assignment,misc]

_DISK_FULL = DISK_FULL | {errno.EFBIG}
_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_NOT_WRITABLE = _NO_SUCH_FILE | {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.EEXIST}


class Storage:
    """Local files and objects in stores, by their paths.

    Methods take paths that `resolve` has returned, and paths below a folder that `resolve` has returned. They raise
    PathOutsideRoots for a path that is not below a root. Two executions may work in a folder at once, because only the
    first `publish` or `create` of a path changes anything.
    """

    def __init__(
        self,
        roots: Sequence[str],
        check_interrupted: Callable[[], None] = never_interrupted,
        timeout_s: float = 300.0,
        shard_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """Take the roots of local files and of objects, in the form that run_path returns.

        check_interrupted: called before anything that takes time. timeout_s: a store's time limit for one call.
        shard_bytes: the most bytes of one shard's prompts. The memory limit of a child process that reads tables is a
        multiple of this number.
        """
        self.check_interrupted = check_interrupted
        self.shard_bytes = shard_bytes
        self._roots = tuple(roots)
        self._timeout_s = timeout_s
        local_roots = [root for root in roots if not is_stored(root)]
        stored_roots = [root for root in roots if is_stored(root)]
        self._local = LocalFiles(local_roots, check_interrupted)
        self._stored: ObjectFiles | None = None
        if stored_roots and ObjectFiles is not None:  # None if obstore is not installed
            self._stored = ObjectFiles(stored_roots, check_interrupted, timeout_s)

    @classmethod
    def of(cls, context: JobContext) -> Self:
        """Return the storage that a job may reach."""
        return cls(
            context.data_roots,
            context.check_interrupted,
            context.file_timeout_s,
            context.shard_bytes.limit,
        )

    def with_root(self, root: str) -> Self:
        """Return a storage with one more root."""
        roots = (*self._roots, root)
        return type(self)(roots, self.check_interrupted, self._timeout_s, self.shard_bytes)

    def _files_of(self, path: str) -> LocalFiles | ObjectFiles:
        """Return the object that reaches a path. Raises PathOutsideRoots for a stored path if no root is in a store."""
        if not is_stored(path.lower()):  # a scheme may be in capitals
            return self._local
        if self._stored is None:
            raise errors.PathOutsideRoots(run_path(path), ":".join(self._roots))
        return self._stored

    def resolve(self, path: str) -> str:
        """Return the canonical path of a file or folder, without links. Raises PathOutsideRoots."""
        return self._files_of(path).resolve(path)

    def stat(self, path: str) -> FileStat | None:
        """Return the state of a regular file, None for anything else."""
        return self._files_of(path).stat(path)

    def entry(self, path: str) -> Entry | None:
        """Return the entry with this path; None if there is none."""
        return self._files_of(path).entry(path)

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder with this path."""
        entry = self.entry(path)
        return entry is not None and entry.is_folder

    def scan(self, folder: str) -> AbstractContextManager[Iterator[Entry]]:
        """Lend the entries of a folder, in any order. The entries are read little by little."""
        return self._files_of(folder).scan(folder)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder. The list is empty if there is no such folder."""
        with suppress(FileNotFoundError), self.scan(folder) as entries:
            return sorted(entry.name for entry in entries)
        return []

    def written_at(self, folder: str) -> dict[str, int]:
        """Return the Unix time, in nanoseconds, at which each file of a folder was written. The keys are the names."""
        return self._files_of(folder).written_at(folder)

    def make_folder(self, path: str) -> None:
        """Make a folder, and the missing folders above it. Raises the errors of `writing`."""
        with writing(path):
            self._files_of(path).make_folder(path)

    def open_input(self, path: str) -> Any:
        """Open a file for pyarrow to read at any offset. Raises InputNotFound if it is no regular file."""
        return self._files_of(path).open_input(path)

    def open_output(self, path: str) -> Any:
        """Open a new file for pyarrow to write. A file that already has this name is removed first."""
        return self._files_of(path).open_output(path)

    def create(self, path: str) -> None:
        """Make an empty file, unless its name is taken."""
        with suppress(FileExistsError):
            self._files_of(path).create(path)

    def publish(self, temporary: str, target: str) -> bool:
        """Give a finished temporary file the name `target`, in the same folder. Return False if the name was taken."""
        try:
            self._files_of(target).publish(temporary, target)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # If another execution has ended the run, it has removed the temporary file, and the target is there.
            if self.stat(target) is None:
                raise
            return False
        return True

    def put(self, path: str, execution_id: str, write: Callable[[Any], object]) -> bool:
        """Call `write` to fill a temporary file, then publish the file as `path`. Return False if `path` was taken."""
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, temporary_name(execution_id, name))
        with writing(path):
            try:
                with self.open_output(temporary) as sink:
                    write(sink)
                return self.publish(temporary, path)
            finally:
                self.remove(temporary)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder if it is empty. Do nothing if there is nothing at the path."""
        with suppress(FileNotFoundError):
            self._files_of(path).remove(path)


@contextmanager
def reading(path: str, file_format: str | None = None) -> Iterator[None]:
    """Turn errors of reading a file into errors that name the file. MemoryError is not changed.

    Raises InputNotFound or CorruptParquet. With a file_format, raises CorruptTable in place of CorruptParquet.
    """
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        error_number = getattr(error, "errno", None)  # None where pyarrow reports broken pages
        if error_number in _NO_SUCH_FILE:
            raise errors.InputNotFound(path) from None
        if error_number is not None or isinstance(error, pa.ArrowMemoryError):
            raise
        if file_format is None:
            raise errors.CorruptParquet(path, _first_line(error)) from error
        raise errors.CorruptTable(path, file_format, _first_line(error)) from error


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn errors of writing a file into errors that name the file. Raises DiskFull or OutputNotWritable."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else _first_line(error)
        if error.errno in _DISK_FULL:
            raise errors.DiskFull(path, reason) from error
        if error.errno in _NOT_WRITABLE:
            raise errors.OutputNotWritable(path, reason) from error
        raise


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().split("\n")[0]
