"""Reaches files on this machine's disks and mounts, below the data roots.

A path is resolved and checked once. Afterwards, somebody who may write below the roots can put a link in place of one
of the path's folders. So each folder is opened by its name within the folder above, and links are refused.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from jobs.context import never_interrupted
from jobs.errors import InputNotFound, PathOutsideRoots, PathSwapped
from jobs.parquet.files.filesystem import Entry, FileStat, NotExclusive
from jobs.runs.plans.paths import run_path

#: The flags that open a folder to enter it, even if it may not be read.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
#: The flags that open a new file. They fail if the name is taken.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def root_of(path: str, roots: Sequence[str], shown_path: str = "") -> str:
    """Return the root that a path is below. Raises PathOutsideRoots. shown_path: the path as the user named it."""
    for root in roots:
        if path == root or path.startswith(root.rstrip("/") + "/"):
            return root
    raise PathOutsideRoots(shown_path or path, ":".join(roots))


@contextmanager
def _entered(path: str, roots: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Lend the descriptor of a folder, for calls with `dir_fd`.

    The descriptor stays at this folder even if another folder takes over the path. create: whether to make missing
    folders. Raises PathOutsideRoots, OSError, or PathSwapped if there is a link on the way.
    """
    path = os.path.normpath(path)
    root = root_of(path, roots)
    path_in_root = path.removeprefix(root).strip("/")
    names = path_in_root.split("/") if path_in_root else []
    folder = os.open(root, _FOLDER)
    try:
        for name in names:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
            with _links_refused(name, folder, path):
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _links_refused(name: str, folder: int, path: str) -> Iterator[None]:
    """Turn an OSError of the body into PathSwapped if `name` is a link in the folder.

    folder: the descriptor of the folder. path: for errors.
    """
    try:
        yield
    except OSError:
        with suppress(OSError):  # if this check fails, the error of the body is raised below
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                raise PathSwapped(path, f"{name!r} is a link now") from None
        raise


#: A flag of renameat2.
_RENAME_NOREPLACE = 1


def rename_exclusively(source: str, target: str, folder: int) -> None:
    """Rename a file, unless its new name is taken. Raises FileExistsError, or OSError if renameat2 is missing.

    folder: the descriptor of the folder that both names are in.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target) from None
    status = rename(folder, os.fsencode(source), folder, os.fsencode(target), _RENAME_NOREPLACE)
    if status != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), target)


#: The errors of filesystems without hard links, or without a rename that fails if the new name is taken.
_NOT_SUPPORTED = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class LocalFiles:
    """Reaches local files. It has the methods of Storage. A link on the way to a file raises PathSwapped."""

    def __init__(
        self, roots: Sequence[str], check_interrupted: Callable[[], None] = never_interrupted
    ) -> None:
        """Take the roots. check_interrupted: called before anything that may take time."""
        self.check_interrupted = check_interrupted
        self._roots = tuple(os.path.realpath(root) for root in roots)

    def resolve(self, path: str) -> str:
        """Return a path without links. Raises PathOutsideRoots."""
        real = os.path.realpath(run_path(path))
        root_of(real, self._roots, path)
        return real

    def stat(self, path: str) -> FileStat | None:
        """Return the state of a regular file, None for anything else."""
        self.check_interrupted()
        try:
            with self._parent(path) as (folder, name):
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        return FileStat(info.st_size, info.st_mtime_ns)

    def entry(self, path: str) -> Entry | None:
        """Return the entry with this path; None if there is none."""
        if not os.path.lexists(path):
            return None
        name = os.path.basename(path)
        return Entry(name, is_folder=os.path.isdir(path), is_link=os.path.islink(path))

    @contextmanager
    def scan(self, folder: str) -> Iterator[Iterator[Entry]]:
        """Lend the entries of a folder, in any order."""
        self.check_interrupted()
        with (
            _entered(folder, self._roots) as descriptor,
            # `descriptor` can enter the folder, but not list it. So the folder is opened once more.
            _opened(".", os.O_RDONLY, descriptor) as listed,
            os.scandir(listed) as entries,
        ):
            yield (
                Entry(entry.name, is_folder=_leads_to_folder(entry), is_link=entry.is_symlink())
                for entry in entries
            )

    def written_at(self, folder: str) -> dict[str, int]:
        """Return the Unix time, in nanoseconds, at which each file of a folder was written. The keys are the names."""
        with self.scan(folder) as entries:
            names = [entry.name for entry in entries]
        written_at = {}
        for name in names:
            state = self.stat(os.path.join(folder, name))
            if state is not None:
                written_at[name] = state.mtime_ns
        return written_at

    def make_folder(self, path: str) -> None:
        """Make a folder, and the missing folders above it."""
        with _entered(path, self._roots, create=True):
            pass

    def open_input(self, path: str) -> Any:
        """Open a file for pyarrow to read. Raises InputNotFound if it is no regular file."""
        self.check_interrupted()
        # Without O_NONBLOCK, a FIFO would block here.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._parent(path) as (folder, name), _links_refused(name, folder, path):
            descriptor = os.open(name, flags, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InputNotFound(path)
        return pa.PythonFile(os.fdopen(descriptor, "rb"), mode="r")

    def open_output(self, path: str) -> Any:
        """Open a new file for pyarrow to write. A file that already has this name is removed first."""
        self.check_interrupted()
        with self._parent(path) as (folder, name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            descriptor = os.open(name, _NEW, mode=0o666, dir_fd=folder)
        return pa.PythonFile(os.fdopen(descriptor, "wb"), mode="w")

    def create(self, path: str) -> None:
        """Make an empty file. Raises FileExistsError."""
        with self._parent(path) as (folder, name):
            descriptor = os.open(name, _NEW, mode=0o666, dir_fd=folder)
            os.close(descriptor)
            _sync(".", folder)
            self._check_in_place(folder, path)

    def publish(self, temporary: str, target: str) -> None:
        """Give a temporary file the name `target` once its contents are on the disk.

        Raises NotExclusive, or FileExistsError if the name is taken. If the folder was moved meanwhile, removes both
        `temporary` and `target`, and raises PathSwapped.
        """
        with self._parent(target) as (folder, name):
            temporary_name = os.path.basename(temporary)
            _sync(temporary_name, folder)
            _put_exclusively(temporary_name, name, folder)
            _sync(".", folder)
            try:
                self._check_in_place(folder, target)
            except PathSwapped:
                for file_name in (name, temporary_name):
                    with suppress(FileNotFoundError):
                        os.unlink(file_name, dir_fd=folder)
                raise

    def remove(self, path: str) -> None:
        """Remove a file, or a folder if it is empty."""
        with self._parent(path) as (folder, name):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                with suppress(OSError):  # raised if the folder is not empty
                    os.rmdir(name, dir_fd=folder)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Lend the descriptor of the folder above a path, with the path's last name."""
        with _entered(os.path.dirname(path), self._roots) as folder:
            yield folder, os.path.basename(path)

    def _check_in_place(self, folder: int, path: str) -> None:
        """Raise PathSwapped if the open folder is no longer the folder above `path`."""
        # An OSError says that no folder is there now.
        with suppress(OSError), self._parent(path) as (folder_now, _):
            if os.path.sameopenfile(folder_now, folder):
                return
        raise PathSwapped(path, "its folder was moved away")


@contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    """Lend the descriptor of a name in an open folder. A link is refused."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _put_exclusively(temporary_name: str, name: str, folder: int) -> None:
    """Give a file its name by a hard link or a rename. Raises NotExclusive, or FileExistsError if the name is taken."""
    try:
        os.link(temporary_name, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as link_error:
        if link_error.errno not in _NOT_SUPPORTED:
            raise
        try:
            rename_exclusively(temporary_name, name, folder)
        except OSError as rename_error:
            if rename_error.errno not in _NOT_SUPPORTED:
                raise
            reason = os.strerror(link_error.errno)
            raise NotExclusive(name, reason) from rename_error


def _sync(name: str, folder: int) -> None:
    """Have the contents of a file or folder written to the disk."""
    with _opened(name, os.O_RDONLY, folder) as descriptor:
        os.fsync(descriptor)


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False
