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


class NotExclusive(OutputError, fault="server"):
    """{name} cannot be put in its place ({reason}): its filesystem has neither hard links nor a rename that replaces
    nothing, so that two workers could overwrite each other's parts; choose an output elsewhere"""


class StoreError(RunError, fault="server"):
    """Base of what an object store may do to a run."""


class StoreRefused(StoreError):
    """the store of {path} refuses it ({reason}): mend the credentials, permissions or region in the worker's
    environment, then submit again; finished parts stay"""


class BucketNotFound(StoreRefused):
    """the store has no bucket of {path} ({reason}): create it, or mend its name or the store's endpoint in the worker's
    environment, then submit again"""


class StoreUnfit(StoreRefused):
    """the store of {path} {lack}, so that two workers could overwrite each other's parts: use one that does (Amazon S3,
    Google Cloud Storage and Azure do), or an output folder on a disk"""


class StoreUnreachable(StoreError):
    """the store of {path} has not served it for {seconds:.1f} s ({reason}): look at the store and the network, or raise
    TOKENMILL_FILE_TIMEOUT_S, then submit again; finished parts stay"""
