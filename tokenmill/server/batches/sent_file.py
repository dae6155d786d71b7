"""A response with a file's bytes, or with the range of them that the client requests (RFC 9110)."""

import re
from collections.abc import AsyncIterator
from typing import IO

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

#: The most bytes that are read and sent at once.
PIECE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class SentFile(StreamingResponse):
    """A response with a file's bytes.

    If the file is deleted during the response, the client gets the whole file, or its connection is cut.
    """

    def __init__(self, source: IO[bytes], size: int, wanted: str | None) -> None:
        """Make the response.

        source: the open file, which is closed at the end. size: the file's bytes. wanted: the header `Range`; a header
        that names several ranges is ignored, as RFC 9110 allows.
        """
        self._source = source
        headers = {"accept-ranges": "bytes"}
        status = 200
        start = 0
        end = size
        match = None if wanted is None else _RANGE.fullmatch(wanted)
        # A range with neither a first nor a last byte is no range, and is ignored.
        if match is not None and match.group() != "bytes=-":
            start, end = _bounds(match[1], match[2], size)
            if start < end:
                status = 206
                headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
            else:
                status = 416
                headers["content-range"] = f"bytes */{size}"
        headers["content-length"] = str(max(0, end - start))
        super().__init__(
            self._pieces(start, end), status, headers, media_type="application/octet-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, and close the file."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await run_in_threadpool(self._source.close)

    async def _pieces(self, start: int, end: int) -> AsyncIterator[bytes]:
        """Read the bytes from `start` to before `end`, piece by piece."""
        await run_in_threadpool(self._source.seek, start)
        while start < end:
            piece = await run_in_threadpool(self._source.read, min(PIECE_BYTES, end - start))
            if not piece:
                # The file has become shorter. The client sees that bytes are missing.
                return
            start += len(piece)
            yield piece


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """Return the first byte of a requested range, and the byte after its last one. first, last: from the header.

    If `first` is "", the range is the end of the file, and `last` is its length. If `last` is "", the range goes on to
    the end of the file.
    """
    if not first:
        return max(0, size - int(last)), size
    if not last:
        return int(first), size
    return int(first), min(size, int(last) + 1)
