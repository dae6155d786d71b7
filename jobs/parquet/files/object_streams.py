"""Objects of a store as files: read at any place, and written from their beginning to their end."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

#: Read at once, and how many such pieces an open object keeps, at first and at most: who reads columns goes
#: through as many places.
BLOCK_BYTES, MIN_BLOCKS, MAX_BLOCKS = 1 << 18, 2, 16

#: Uploaded at once; a smaller object goes in one request. A store takes at most 10,000 such parts of one.
CHUNK_BYTES = 8 << 20

_POLL_S = 0.5


class ObjectReader:
    """What pyarrow needs of a Python file that it reads.

    It takes MIN_BLOCKS blocks of memory, and up to MAX_BLOCKS where one is read again soon after it was let
    go of.
    """

    closed = False

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        """fetch: returns the bytes from one place to another. size: of the object."""
        self._fetch, self._size, self._place = fetch, size, 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._room, self._let_go = MIN_BLOCKS, deque[int](maxlen=MAX_BLOCKS)

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
        self._blocks.clear()

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
        else:
            if number in self._let_go:
                self._room = min(2 * self._room, MAX_BLOCKS)
                self._let_go.clear()
            if len(self._blocks) >= self._room:
                self._let_go.append(self._blocks.popitem(last=False)[0])
            start = number * BLOCK_BYTES
            self._blocks[number] = self._fetch(start, min(self._size, start + BLOCK_BYTES))
        return self._blocks[number]


class ObjectSink(pa.PythonFile):  # type: ignore[misc]
    """An object that is written. It is there, whole, once it was closed; never where its body raises."""

    def __init__(self, writer: ObjectWriter, mode: str) -> None:  # as PythonFile takes them
        self._writer = writer

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._writer.abort()
        super().__exit__(kind, error, traceback)


class ObjectWriter:
    """What pyarrow needs of a Python file that it writes. It takes some five chunks of memory."""

    def __init__(
        self,
        put: Callable[[bytes], None],
        put_chunks: Callable[[Iterator[bytes]], None],
        check_interrupted: Callable[[], None],
    ) -> None:
        """put: uploads the whole object; put_chunks: one in pieces, and nothing where the iterator raises."""
        self._put, self._put_chunks, self._check_interrupted = put, put_chunks, check_interrupted
        self._waiting = bytearray()
        self._upload: _Upload | None = None
        self.closed = False

    def write(self, data: Any) -> int:
        self._waiting += data
        while len(self._waiting) > CHUNK_BYTES:
            if self._upload is None:
                self._upload = _Upload(self._put_chunks, self._check_interrupted)
            self._upload.add(bytes(self._waiting[:CHUNK_BYTES]))
            del self._waiting[:CHUNK_BYTES]
        return len(data)

    def flush(self) -> None:
        """A store takes whole objects."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._upload is None:
            self._put(bytes(self._waiting))
        else:
            self._upload.add(bytes(self._waiting))
            self._upload.finish()

    def abort(self) -> None:
        """Leave nothing in the store."""
        self.closed = True
        if self._upload is not None:
            self._upload.abort()


class _Aborted(Exception):
    """Ends an upload that nobody wants any more."""


class _Upload:
    """Hands chunks to a thread that uploads them: obstore takes an iterator, and pyarrow writes to a file."""

    def __init__(
        self, put_chunks: Callable[[Iterator[bytes]], None], check_interrupted: Callable[[], None]
    ) -> None:
        self._chunks: queue.Queue[bytes | None] = queue.Queue(maxsize=1)
        self._put_chunks, self._check_interrupted = put_chunks, check_interrupted
        self._aborted = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tokenmill-upload", daemon=True)
        self._thread.start()

    def add(self, chunk: bytes | None) -> None:
        """Wait until the chunk is taken; None ends the object. Raises what the upload has raised."""
        while self._thread.is_alive():
            try:
                self._chunks.put(chunk, timeout=_POLL_S)
            except queue.Full:
                self._check_interrupted()
            else:
                return
        self._raise()

    def finish(self) -> None:
        """Return once the object is there."""
        try:
            self.add(None)
            while self._thread.is_alive():
                self._thread.join(_POLL_S)
                self._check_interrupted()
        except BaseException:
            self.abort()
            raise
        self._raise()

    def abort(self) -> None:
        self._aborted = True
        while self._thread.is_alive():
            try:
                self._chunks.put_nowait(None)
            except queue.Full:
                self._thread.join(_POLL_S)
            else:
                self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._put_chunks(self._taken())
        except BaseException as error:  # noqa: BLE001  # raised where the object is written
            self._error = error

    def _taken(self) -> Iterator[bytes]:
        while (chunk := self._chunks.get()) is not None and not self._aborted:
            yield chunk
        if self._aborted:
            raise _Aborted
