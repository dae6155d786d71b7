"""The few file operations that a run needs, below the data roots, and names for what goes wrong with them."""

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
    """All the places where a run's files may lie: each path leads to local files, or to objects.

    Methods take paths that `resolve` has returned, or names in such a folder, else raise PathOutsideRoots. What two
    executions may do at once rests on `publish` and `create`, of which the first one alone changes anything.
    """

    def __init__(
        self,
        roots: Sequence[str],
        check_interrupted: Callable[[], None] = never_interrupted,
        timeout_s: float = 300.0,
        shard_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """Take roots of files, and of objects as of run_path. check_interrupted: called before what takes time.
        shard_bytes: of one shard's prompts; whatever reads a table takes a share of as many."""
        self.check_interrupted, self.shard_bytes = check_interrupted, shard_bytes
        self._roots, self._timeout_s = tuple(roots), timeout_s
        self._local = LocalFiles([root for root in roots if not is_stored(root)], check_interrupted)
        stored = [root for root in roots if is_stored(root)]
        self._stored: ObjectFiles | None = None
        if stored and ObjectFiles is not None:
            self._stored = ObjectFiles(stored, check_interrupted, timeout_s)

    @classmethod
    def of(cls, context: JobContext) -> Self:
        return cls(context.data_roots, context.check_interrupted, context.file_timeout_s, context.shard_bytes.limit)

    def with_root(self, root: str) -> Self:
        return type(self)((*self._roots, root), self.check_interrupted, self._timeout_s, self.shard_bytes)

    def _of(self, path: str) -> LocalFiles | ObjectFiles:
        if not is_stored(path.lower()):
            return self._local
        if self._stored is None:
            raise errors.PathOutsideRoots(run_path(path), ":".join(self._roots))
        return self._stored

    def resolve(self, path: str) -> str:
        """Return the one name of what a path leads to. Raises PathOutsideRoots."""
        return self._of(path).resolve(path)

    def stat(self, path: str) -> FileStat | None:
        """Return the state of a regular file, None for anything else."""
        return self._of(path).stat(path)

    def look(self, path: str) -> Entry | None:
        """Return what has this path, a link as what it leads to; None where nothing has."""
        return self._of(path).look(path)

    def is_folder(self, path: str) -> bool:
        found = self.look(path)
        return found is not None and found.is_folder

    def scan(self, folder: str) -> AbstractContextManager[Iterator[Entry]]:
        """Lend what a folder holds, in any order, read from it little by little."""
        return self._of(folder).scan(folder)

    def names(self, folder: str) -> list[str]:
        """Return what a folder holds, sorted; nothing of one that is not there."""
        with suppress(FileNotFoundError), self.scan(folder) as entries:
            return sorted(entry.name for entry in entries)
        return []

    def written_at(self, folder: str) -> dict[str, int]:
        return self._of(folder).written_at(folder)

    def make_folder(self, path: str) -> None:
        """Make a folder, and what is missing above it. Raises as `writing` does."""
        with writing(path):
            self._of(path).make_folder(path)

    def open_input(self, path: str) -> Any:
        """Open a file as pyarrow reads it, at any place. Raises InputNotFound for anything else."""
        return self._of(path).open_input(path)

    def open_output(self, path: str) -> Any:
        """Open a new file for pyarrow to write; what had its name is removed."""
        return self._of(path).open_output(path)

    def create(self, path: str) -> None:
        """Make an empty file, unless something has its name."""
        with suppress(FileExistsError):
            self._of(path).create(path)

    def publish(self, temporary: str, target: str) -> bool:
        """Put a whole file in its place, in the same folder; return False if the place was taken."""
        try:
            self._of(target).publish(temporary, target)
        except FileExistsError:
            return False
        except FileNotFoundError:
            # Whoever finished the run removed leftovers, this file among them; that needs a published target.
            if self.stat(target) is None:
                raise
            return False
        return True

    def put(self, path: str, execution_id: str, write: Callable[[Any], object]) -> bool:
        """Have a file written and put in place, whole, or not at all; return False if the place was taken."""
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
        """Remove a file, or a folder if nothing is in it; do nothing where there is none."""
        with suppress(FileNotFoundError):
            self._of(path).remove(path)


@contextmanager
def reading(path: str, file_format: str | None = None) -> Iterator[None]:
    """Name the file in what goes wrong while it is read. Raises InputNotFound, CorruptParquet or, where a
    file_format is given, CorruptTable. A lack of memory passes as it is.
    """
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        number = getattr(error, "errno", None)  # None where pyarrow reports broken pages
        if number in _NO_SUCH_FILE:
            raise errors.InputNotFound(path) from None
        if number is not None or isinstance(error, pa.ArrowMemoryError):
            raise
        if file_format is None:
            raise errors.CorruptParquet(path, _first_line(error)) from error
        raise errors.CorruptTable(path, file_format, _first_line(error)) from error


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Name the file in what goes wrong while it is written. Raises DiskFull or OutputNotWritable."""
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
    return str(error).strip().split("\n")[0]
