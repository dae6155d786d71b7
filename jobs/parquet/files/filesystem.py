"""What a run needs of the place where its files lie, and what such a place can fail with."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs.errors import OutputError, RunError


@dataclass(frozen=True)
class FileStat:
    """What tells one state of a file from another: size in bytes, modification time in nanoseconds, and what
    its store calls it."""

    size: int
    mtime_ns: int
    etag: str = ""


class Entry(NamedTuple):
    """One name in a folder. is_folder: or a link to one."""

    name: str
    is_folder: bool
    is_link: bool


class Filesystem(ABC):
    """A place for a run's files. Every method but `resolve` takes paths that it has returned, or names in
    such a folder, and raises PathOutsideRoots for others.

    What two executions of a run may do at once rests on `publish`, of which one alone succeeds, and on
    `replace`, `rename` and `rewrite`, which fail where the file that they take was removed.
    """

    @abstractmethod
    def resolve(self, path: str) -> str:
        """Return the one name of what a path leads to. Raises PathOutsideRoots."""

    @abstractmethod
    def stat(self, path: str) -> FileStat | None:
        """Return the state of a file, None for anything else."""

    @abstractmethod
    def what_is_there(self, path: str) -> str:
        """Say what stands where a file was."""

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether a path, resolved or not, leads to a folder."""

    @abstractmethod
    def look(self, path: str) -> Entry | None:
        """Return what has this path, resolved or not; None where nothing has."""

    @abstractmethod
    def scan(self, folder: str) -> AbstractContextManager[Iterator[Entry]]:
        """Lend what a folder holds, in any order, read from it little by little."""

    def names(self, folder: str) -> Collection[str]:
        """Return the names in a folder, which may be many."""
        with self.scan(folder) as entries:
            return [entry.name for entry in entries]

    @abstractmethod
    def written_at(self, folder: str) -> dict[str, int]:
        """Return when each file in a folder was written, in Unix nanoseconds."""

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder, and what is missing above it."""

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Remove a folder, if nothing is in it."""

    @abstractmethod
    def open_input(self, path: str) -> Any:
        """Open a file as pyarrow reads it, at any place. Raises InputNotFound for anything else."""

    @abstractmethod
    def open_output(self, path: str) -> Any:
        """Open a new file for pyarrow to write; what had its name is removed."""

    @abstractmethod
    def reopen_output(self, path: str) -> Any:
        """Open a file that is there to be written anew by pyarrow; return None if someone removed it."""

    @abstractmethod
    def rewrite(self, path: str, contents: bytes) -> bool:
        """Write a file that is there anew; return False if someone removed it."""

    @abstractmethod
    def make_void(self, path: str, text: str) -> None:
        """Make a name that `stat` does not see, and that tells whoever lists the folder why."""

    @abstractmethod
    def publish(self, temporary: str, target: str) -> bool:
        """Put a written file in its place, in the same folder, without replacing; return False if the place
        was taken. A file that is there is whole."""

    @abstractmethod
    def replace(self, temporary: str, target: str) -> bool:
        """Put a written file in its place, in the same folder, over what was there; return False if someone
        removed it first."""

    @abstractmethod
    def rename(self, path: str, target: str) -> bool:
        """As `replace`, for what `make_void` has made: `stat` finds nothing in that place any more."""

    @abstractmethod
    def remove(self, path: str) -> bool:
        """Remove a file; return False if someone else did before."""


class NotExclusive(OutputError):
    """Raised when a filesystem cannot put a file in its place without replacing: (name, its reason)."""

    fault = "server"
    message = (
        "{0} cannot be put in its place ({1}): its filesystem has neither hard links nor a rename that "
        "replaces nothing, so that two workers could overwrite each other's parts; choose an output elsewhere"
    )


class StoreError(RunError):
    """Base of what an object store may do to a run."""

    fault = "server"


class StoreRefused(StoreError):
    """Raised when an object store does not let a worker do what it asks for: (path, the store's reason)."""

    message = (
        "the store of {0} refuses it ({1}): mend the credentials, permissions or region in the worker's "
        "environment, then submit again; finished parts stay"
    )


class BucketNotFound(StoreRefused):
    """Raised when there is no such bucket: (path, the store's reason)."""

    message = (
        "the store has no bucket of {0} ({1}): create it, or mend its name or the store's endpoint in the "
        "worker's environment, then submit again"
    )


class StoreUnfit(StoreRefused):
    """Raised when a store does not do what a run's files rest on: (path, what is missing)."""

    message = (
        "the store of {0} {1}, so that two workers could overwrite each other's parts: use one that does "
        "(Amazon S3, Google Cloud Storage and Azure do), or an output folder on a disk"
    )


class StoreUnreachable(StoreError):
    """Raised when an object store gave no answer for too long: (path, seconds, the last reason)."""

    message = (
        "the store of {0} has not served it for {1:.1f} s ({2}): look at the store and the network, or raise "
        "TOKENMILL_FILE_TIMEOUT_S, then submit again; finished parts stay"
    )
