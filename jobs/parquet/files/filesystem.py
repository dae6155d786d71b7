"""What is told of files, wherever they lie, and what such a place can fail with."""

from dataclasses import dataclass
from typing import NamedTuple

from jobs.errors import OutputError, RunError


@dataclass(frozen=True)
class FileStat:
    """What tells one state of a file from another: bytes, modification time in ns, and its store's name for it."""

    size: int
    mtime_ns: int
    etag: str = ""


class Entry(NamedTuple):
    """One name in a folder. is_folder: or a link to one."""

    name: str
    is_folder: bool
    is_link: bool


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
