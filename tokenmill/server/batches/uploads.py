"""Reads a multipart upload. The file is written to disk as it comes, and the fields are held in memory.

Source: RFC 7578 (multipart/form-data).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from email.message import Message
from email.utils import collapse_rfc2231_value
from hashlib import sha256

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from starlette.concurrency import run_in_threadpool

from jobs.common.display import safe_name
from tokenmill.server.batches.folders import Draft
from tokenmill.server.errors import ApiError

#: The most bytes of all fields together, with their headers.
MAX_FIELD_BYTES = 1 << 16
#: The most bytes of an upload beside its file: fields, boundaries, and the epilogue after the last boundary.
MAX_OTHER_BYTES = 1 << 20
#: How many bytes of a file are collected before they are written.
WRITE_BYTES = 1 << 20
#: The most seconds for which a client may send nothing.
SILENT_S = 60.0
#: The fewest bytes per second that an upload of more than SILENT_S may have on average.
MIN_RATE = 1 << 10
#: The most characters of a file's name. The rest is cut off.
MAX_NAME_CHARS = 255


class Upload:
    """One upload. fields: values by name. file_name: the client's name for the file; None until the file has come."""

    def __init__(
        self,
        content_type: str,
        sink: Draft,
        max_file_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_hashed: bool = False,
    ) -> None:
        """Prepare to read. Raises ApiError if the content type is not multipart/form-data.

        sink: takes the bytes of the field `file`. clock: monotonic seconds. is_hashed: whether to compute
        `file_digest`.
        """
        kind = _parameter(content_type, None)
        boundary = _parameter(content_type, "boundary")
        if kind.lower() != "multipart/form-data" or not boundary:
            raise ApiError(400, "the body is no multipart/form-data with a boundary")
        self._clock = clock
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self._sink = sink
        self._max_file_bytes = max_file_bytes
        self._num_field_bytes = 0
        self._num_file_bytes = 0
        self._has_ended = False
        self._unwritten = bytearray()  # bytes of the file
        self._hash = sha256() if is_hashed else None
        try:
            self._parser = MultipartParser(
                boundary.encode("latin-1", "replace"),
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_header_name,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise ApiError(400, f"the upload is no multipart/form-data: {error}") from None

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the whole body. Raises OSError, and ApiError for a body that is cut, too large or too slow."""
        began_at = self._clock()
        num_bytes = 0
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise ApiError(408, f"nothing of the upload came for {SILENT_S:.0f} s") from None
            if chunk is None:
                break
            num_bytes += len(chunk)
            if num_bytes > self._max_file_bytes + MAX_OTHER_BYTES:
                raise ApiError(413, f"the file has more than {self._max_file_bytes} bytes")
            duration_s = self._clock() - began_at
            if duration_s > SILENT_S and num_bytes < duration_s * MIN_RATE:
                raise ApiError(408, f"the upload came with less than {MIN_RATE} bytes a second")
            if self._has_ended:
                # RFC 2046: what follows the last boundary is ignored.
                continue
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise ApiError(400, f"the upload is no multipart/form-data: {error}") from None
            if len(self._unwritten) >= WRITE_BYTES:
                await self._write()
        await self._write()
        if not self._has_ended:
            raise ApiError(400, "the upload ends before its last boundary: send it again")
        if self.file_name is None:
            raise ApiError(400, "the upload has no field `file`", param="file")

    async def _write(self) -> None:
        data = self._unwritten
        self._unwritten = bytearray()
        await run_in_threadpool(self._sink.write, data)
        if self._hash is not None:
            await run_in_threadpool(self._hash.update, data)

    @property
    def file_digest(self) -> str | None:
        """The SHA-256 of the bytes that were written so far, as hex; None unless `is_hashed`."""
        return None if self._hash is None else self._hash.hexdigest()

    def _begin_part(self) -> None:
        self._headers: dict[str, str] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._name = ""
        self._value = bytearray()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._count_field(end - start)
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_field(end - start)
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        name = self._header_name.decode("latin-1").lower()
        self._headers[name] = self._header_value.decode("utf-8", "replace")
        self._header_name = bytearray()
        self._header_value = bytearray()

    def _end_headers(self) -> None:
        """Read the name of the field, and the file's name. Raises ApiError for a second file."""
        disposition = self._headers.get("content-disposition", "")
        self._name = _parameter(disposition, "name")
        if self._name == "file":
            if self.file_name is not None:
                raise ApiError(400, "the upload has two fields `file`", param="file")
            file_name = safe_name(_parameter(disposition, "filename"), MAX_NAME_CHARS)
            self.file_name = file_name or "upload"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        """Take bytes of the file or of a field. Raises ApiError if they are too many."""
        if self._name != "file":
            self._count_field(end - start)
            self._value += data[start:end]
            return
        self._num_file_bytes += end - start
        if self._num_file_bytes > self._max_file_bytes:
            raise ApiError(
                413, f"the file has more than {self._max_file_bytes} bytes", param="file"
            )
        self._unwritten += data[start:end]

    def _end_part(self) -> None:
        if self._name and self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True

    def _count_field(self, size: int) -> None:
        """Count bytes of fields and headers. Raises ApiError if they are too many."""
        self._num_field_bytes += size
        if self._num_field_bytes > MAX_FIELD_BYTES:
            raise ApiError(413, f"the upload's fields have more than {MAX_FIELD_BYTES} bytes")


def _parameter(header: str, name: str | None) -> str:
    """Return a header's parameter, or its main value if `name` is None; "" if it is missing or cannot be decoded."""
    message = Message()
    # Message reads the parameters of this header. Those of other headers have the same form.
    message["content-type"] = header
    try:
        if name is None:
            return message.get_content_type()
        value = collapse_rfc2231_value(message.get_param(name, ""))
    except ValueError:  # RFC 2231 lets the client name a character set
        return ""
    return value.encode("utf-8", "replace").decode()
