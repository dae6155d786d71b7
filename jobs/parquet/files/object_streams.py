"""Objects of a store as files: read at any place, and written from their beginning to their end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import pyarrow as pa
from obstore.exceptions import BaseError

#: Read at once, and how many such pieces an open object keeps: who reads columns goes through as many places.
BLOCK_BYTES, MAX_BLOCKS = 1 << 18, 16

#: Uploaded at once; a smaller object goes in one request. A store takes at most 10,000 such parts of one.
CHUNK_BYTES = 8 << 20


class ObjectReader:
    """What pyarrow needs of a Python file that it reads. It keeps the blocks that were read last."""

    closed = False

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        """Take what reads an object. fetch: returns the bytes from one place to another. size: of the object."""
        self._fetch, self._size, self._place = fetch, size, 0
        self._block = lru_cache(MAX_BLOCKS)(self._fetch_block)

    def read(self, size: int | None = None) -> bytes:
        """Return so many bytes, fewer only at the object's end."""
        end = self._size if size is None or size < 0 else min(self._size, self._place + size)
        start, self._place = self._place, max(end, self._place)
        if end - start > BLOCK_BYTES:  # such as a large footer: read once
            return self._fetch(start, end)
        pieces = []
        while start < end:
            number, within = divmod(start, BLOCK_BYTES)
            piece = self._block(number)[within : within + end - start]
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)

    def seek(self, place: int, whence: int = 0) -> int:
        self._place = place + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        self.closed = True
        self._block.cache_clear()

    def _fetch_block(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        return self._fetch(start, min(self._size, start + BLOCK_BYTES))


class ObjectSink(pa.PythonFile):  # type: ignore[misc]
    """An object that is written. It is there, whole, once it was closed; never where its body raises."""

    def __init__(self, writer: ObjectWriter, mode: str) -> None:  # as PythonFile takes them
        self._writer = writer

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._writer.abort(kind, error, traceback)
        super().__exit__(kind, error, traceback)


class ObjectWriter:
    """What pyarrow needs of a Python file that it writes; takes some five chunks of memory.

    put: uploads the whole object. open_upload: opens obstore's writer. once: makes a request, and names what fails.
    """

    def __init__(
        self, put: Callable[[bytes], None], open_upload: Callable[[], Any], once: Callable[[Callable[[], Any]], None]
    ) -> None:
        self._put, self._open_upload, self._once = put, open_upload, once
        self._waiting = bytearray()
        self._upload: Any = None
        self.closed = False

    def write(self, data: Any) -> int:
        self._waiting += data
        if len(self._waiting) > CHUNK_BYTES:
            self._send()
        return len(data)

    def flush(self) -> None:
        """Do nothing: a store takes whole objects."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._upload is None:
            self._put(bytes(self._waiting))
        else:
            self._send()
            self._once(self._upload.close)

    def abort(self, *raised: Any) -> None:
        """Leave nothing in the store."""
        self.closed = True
        if self._upload is not None:
            with suppress(BaseError, OSError, ValueError):  # what was raised says more
                self._upload.__exit__(*raised)

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._open_upload()
        self._once(lambda: self._upload.write(bytes(self._waiting)))
        self._waiting.clear()
