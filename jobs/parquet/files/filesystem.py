"""What local files and object stores have in common: a file's state, a folder's entry, errors, and FetchedFile."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs.errors import OutputError, RunError


@dataclass(frozen=True)
class FileStat:
    """The state of a file. size: in bytes. mtime_ns: Unix time. etag: the store's name for this state."""

    size: int
    mtime_ns: int
    etag: str = ""


class Entry(NamedTuple):
    """One name in a folder. is_folder: whether it is a folder, or a link to one."""

    name: str
    is_folder: bool
    is_link: bool


class NotExclusive(OutputError, fault="server"):
    """{name} cannot be put in its place ({reason}): its filesystem has neither hard links nor a rename that keeps an
    existing file, so that two workers could overwrite each other's parts; choose an output elsewhere"""


class StoreError(RunError, fault="server"):
    """Base of the errors of an object store."""


class StoreRefused(StoreError):
    """the store of {path} refuses it ({reason}): mend the credentials, permissions or region in the worker's
    environment, then submit again; finished parts stay"""


class BucketNotFound(StoreRefused):
    """the store has no bucket of {path} ({reason}): create it, or mend its name or the store's endpoint in the worker's
    environment, then submit again"""


class StoreUnfit(StoreRefused):
    """the store of {path} {lack}, so that two workers could overwrite each other's parts: use a store that keeps
    existing objects (Amazon S3, Google Cloud Storage and Azure do), or an output folder on a disk"""


class StoreUnreachable(StoreError):
    """the store of {path} has not answered for {seconds:.1f} s ({reason}): look at the store and the network, or raise
    TOKENMILL_FILE_TIMEOUT_S, then submit again; finished parts stay"""


#: The most bytes that are fetched at once.
FETCH_BYTES = 1 << 20


class FetchedFile(io.RawIOBase):
    """A Python file whose bytes are fetched when they are read.

    fetch: returns the bytes from a start offset up to an end offset. size: the size of the whole file.
    """

    def __init__(self, fetch: Callable[[int, int], bytes | bytearray], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._offset = 0  # where the next read begins

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set where the next read begins; return that offset from the file's beginning."""
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._size}
        self._offset = origins[whence] + offset
        return self._offset

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer; return how many."""
        end = min(self._size, self._offset + len(buffer))
        num_read = 0
        while self._offset < end:
            piece_end = min(end, self._offset + FETCH_BYTES)
            fetched = self._fetch(self._offset, piece_end)
            if not fetched:
                break
            buffer[num_read : num_read + len(fetched)] = fetched
            num_read += len(fetched)
            self._offset += len(fetched)
        return num_read

    def read(self, size: int | None = -1) -> bytes:
        """Read up to `size` bytes. No memory is taken for bytes that the file does not have."""
        bytes_left = max(0, self._size - self._offset)
        if size is None or size < 0:
            size = bytes_left
        content = super().read(min(size, bytes_left))
        # RawIOBase.read may return None, but never does so with our `readinto`.
        return content or b""
