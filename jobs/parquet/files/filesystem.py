"""Files that lie anywhere: what is told of one, what reads as one, and what such a place can fail with."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


FETCH_BYTES = 1 << 20


class FetchedFile(io.RawIOBase):
    """A Python file over bytes that are fetched. fetch: returns those from one place to another. size: of all."""

    def __init__(self, fetch: Callable[[int, int], bytes | bytearray], size: int) -> None:
        self._fetch, self._size, self._at = fetch, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = 0) -> int:
        self._at = place + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        start, end = self._at, min(self._size, self._at + len(buffer))
        while self._at < end and (part := self._fetch(self._at, min(end, self._at + FETCH_BYTES))):
            place = self._at - start
            buffer[place : place + len(part)] = part
            self._at += len(part)
        return self._at - start

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes; those that a file only claims to have are not made room for."""
        left = max(0, self._size - self._at)
        return super().read(left if size is None or size < 0 else min(size, left)) or b""
