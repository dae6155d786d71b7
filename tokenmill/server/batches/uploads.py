"""Reads a multipart upload: its file goes to disk as it comes, its fields into memory.

Source: RFC 7578 (multipart/form-data).
"""

import asyncio
from collections.abc import AsyncIterator
from email.message import Message
from typing import BinaryIO

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from starlette.concurrency import run_in_threadpool

from tokenmill.server.errors import ApiError

#: The most bytes of all fields together, with their headers.
MAX_FIELD_BYTES = 1 << 16
#: Bytes of a file that are written at once.
WRITE_BYTES = 1 << 20
#: Seconds that a client may send nothing.
SILENT_S = 60.0


class Upload:
    """One upload as it comes. fields: by their names. file_name: what the client calls the file; None without one."""

    def __init__(self, content_type: str, sink: BinaryIO, max_file_bytes: int) -> None:
        """Raises ApiError for a body that is no multipart. sink: takes the bytes of the field `file`."""
        message = Message()
        message["content-type"] = content_type
        boundary = message.get_boundary()
        if message.get_content_type() != "multipart/form-data" or boundary is None:
            raise ApiError(400, "the body is no multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self._sink = sink
        self._max_file_bytes = max_file_bytes
        self._num_field_bytes = 0
        self._num_file_bytes = 0
        self._has_ended = False
        self._waiting = bytearray()  # bytes of the file that are not written yet
        self._parser = MultipartParser(
            boundary,
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

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the whole body. Raises ApiError for one that is cut, too large or too slow, and OSError."""
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise ApiError(408, f"nothing of the upload came for {SILENT_S:.0f} s") from None
            if chunk is None:
                break
            try:
                self._parser.write(chunk)
            except MultipartParseError as error:
                raise ApiError(400, f"the upload is no multipart/form-data: {error}") from None
            if len(self._waiting) >= WRITE_BYTES:
                await self._write()
        await self._write()
        if not self._has_ended:
            raise ApiError(400, "the upload ends before its last boundary: send it again")
        if self.file_name is None:
            raise ApiError(400, "the upload has no field `file`", param="file")

    async def _write(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        await run_in_threadpool(self._sink.write, waiting)

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
        message = Message()
        message["content-disposition"] = self._headers.get("content-disposition", "")
        name = message.get_param("name", "", "content-disposition")
        self._name = name if isinstance(name, str) else ""
        if self._name == "file":
            if self.file_name is not None:
                raise ApiError(400, "the upload has two fields `file`", param="file")
            self.file_name = message.get_filename("") or "upload"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != "file":
            self._count_field(end - start)
            self._value += data[start:end]
            return
        self._num_file_bytes += end - start
        if self._num_file_bytes > self._max_file_bytes:
            raise ApiError(
                413, f"the file has more than {self._max_file_bytes} bytes", param="file"
            )
        self._waiting += data[start:end]

    def _end_part(self) -> None:
        if self._name and self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True

    def _count_field(self, size: int) -> None:
        self._num_field_bytes += size
        if self._num_field_bytes > MAX_FIELD_BYTES:
            raise ApiError(413, f"the upload's fields have more than {MAX_FIELD_BYTES} bytes")
