"""Sends a file, or the range of it that is asked for."""

import re
from collections.abc import AsyncIterator
from typing import IO

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

#: Bytes that are read and sent at once.
PIECE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class SentFile(StreamingResponse):
    """A file as it was when it was opened. One that is deleted meanwhile is sent whole, or the connection is cut."""

    def __init__(self, source: IO[bytes], size: int, wanted: str | None) -> None:
        """source: is closed at the end. wanted: the header `Range`, RFC 9110; several ranges at once are not built."""
        self._source = source
        headers = {"accept-ranges": "bytes"}
        status = 200
        found = None if wanted is None else _RANGE.fullmatch(wanted)
        start, end = 0, size
        if found is not None and found.group() != "bytes=-":
            start, end = _bounds(found[1], found[2], size)
            status = 206 if start < end else 416
            place = f"{start}-{end - 1}" if start < end else "*"
            headers["content-range"] = f"bytes {place}/{size}"
        headers["content-length"] = str(max(0, end - start))
        super().__init__(
            self._pieces(start, end), status, headers, media_type="application/octet-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await run_in_threadpool(self._source.close)

    async def _pieces(self, start: int, end: int) -> AsyncIterator[bytes]:
        await run_in_threadpool(self._source.seek, start)
        while start < end:
            piece = await run_in_threadpool(self._source.read, min(PIECE_BYTES, end - start))
            if not piece:  # it was cut meanwhile: the client sees that bytes are missing
                return
            start += len(piece)
            yield piece


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """Return where a range begins and ends. RFC 9110: without its first byte it is the file's last bytes."""
    if not first:
        return max(0, size - int(last)), size
    end = size if not last else min(size, int(last) + 1)
    return int(first), end
