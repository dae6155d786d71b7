"""A file whose bytes lie elsewhere: in a store, or with the process that has opened it."""

import io
from collections.abc import Callable
from typing import Any

FETCH_BYTES = 1 << 20


class FetchedFile(io.RawIOBase):
    """What Python calls a file. fetch: returns the bytes from one place to another. size: of the file."""

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
