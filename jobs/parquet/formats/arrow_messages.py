"""What the messages of an Arrow file say, looked at before pyarrow reads their bodies: rows and bytes.

Source: the Arrow columnar format, "Serialization and Interprocess Communication", its Message.fbs and
File.fbs, and FlatBuffers' internals (a table is behind an offset, and begins with that of its vtable).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

FILE_MARK = b"ARROW1"

#: Of one message: its columns and buffers, not its rows.
MAX_METADATA_BYTES = 1 << 24

#: Messages of one file.
MAX_MESSAGES = 1_000_000

_DICTIONARY, _BATCH = 2, 3  # of the union MessageHeader
_CONTINUES = 0xFFFFFFFF
_BLOCK_BYTES = 24  # of the struct Block: offset, length of the metadata, padding, length of the body


class Message(NamedTuple):
    """One message. offset, num_bytes: of all of it in the file. rows: of a record batch, None for any other.
    size: bytes of its body once it is decompressed."""

    offset: int
    num_bytes: int
    rows: int | None
    size: int
    is_dictionary: bool


@dataclass(frozen=True)
class Messages:
    """What a file holds: its record batches, and whether it is one with a footer. dictionaries: what they
    take together. in_order: of a stream, all its messages."""

    is_file: bool
    batches: list[Message]
    dictionaries: int
    in_order: list[Message]


def read_messages(source: Any) -> Messages:
    """Look through an open pyarrow file. Raises ValueError, IndexError or struct.error for what is none."""
    is_file = source.read_at(len(FILE_MARK), 0) == FILE_MARK
    found = _of_file(source) if is_file else _of_stream(source)
    dictionaries = sum(each.size for each in found if each.is_dictionary)
    return Messages(is_file, [each for each in found if each.rows is not None], dictionaries, found)


class _Table:
    """A FlatBuffers table. start: its first byte within `data`."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._start = data, start
        self._vtable = start - self._number("<i", start)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, int(struct.unpack_from("<I", data)[0]))

    def number(self, field: int, kind: str, default: int = 0) -> int:
        place = self._place(field)
        return default if place is None else self._number(kind, place)

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return None if place is None else _Table(self._data, place + self._number("<I", place))

    def structs(self, field: int, size: int) -> list[bytes]:
        """Return the structs of a vector, as bytes."""
        place = self._place(field)
        if place is None:
            return []
        place += self._number("<I", place)
        count, place = self._number("<I", place), place + 4
        if count * size > len(self._data) - place:
            raise ValueError("a list in its metadata is longer than that")
        return [self._data[place + size * each : place + size * (each + 1)] for each in range(count)]

    def _place(self, field: int) -> int | None:
        at = 4 + 2 * field
        if at >= self._number("<H", self._vtable):
            return None
        offset = self._number("<H", self._vtable + at)
        return self._start + offset if offset else None

    def _number(self, kind: str, place: int) -> int:
        if place < 0:
            raise ValueError("an offset in its metadata leads out of it")
        return int(struct.unpack_from(kind, self._data, place)[0])


def _of_file(source: Any) -> list[Message]:
    size = source.size()
    tail = source.read_at(4 + len(FILE_MARK), max(0, size - 4 - len(FILE_MARK)))
    length = int(struct.unpack("<I", tail[:4])[0])
    if tail[4:] != FILE_MARK or length > min(size, MAX_METADATA_BYTES):
        raise ValueError("its end is no footer of an Arrow file: it may have been cut")
    footer = _Table.root(source.read_at(length, size - length - len(tail)))
    found = []
    for field in (2, 3):  # dictionaries, record batches
        for block in footer.structs(field, _BLOCK_BYTES):
            offset, metadata, body = struct.unpack("<qi4xq", block)
            if offset < 0 or metadata < 8 or body < 0 or offset + metadata + body > size:
                raise ValueError("its footer names a record batch beyond its end")
            message = _message(source, offset)
            if message is None or offset + metadata + body != offset + message.num_bytes:
                raise ValueError("its footer and a record batch contradict each other")
            found.append(message)
    return found


def _of_stream(source: Any) -> list[Message]:
    found: list[Message] = []
    offset, size = 0, source.size()
    while offset < size and (message := _message(source, offset)) is not None:
        if offset + message.num_bytes > size:
            raise ValueError("its last record batch is not whole: it was cut, or is still being written")
        found.append(message)
        if len(found) > MAX_MESSAGES:
            raise ValueError(f"it has more than {MAX_MESSAGES} record batches")
        offset += message.num_bytes
    if not found:
        raise ValueError("it is no Arrow file, and no stream")
    return found


def _message(source: Any, offset: int) -> Message | None:
    """Read a message's metadata; None for the end of a stream."""
    head = source.read_at(8, offset)
    if len(head) < 4:
        raise ValueError("it ends within a message")
    first, head_bytes = struct.unpack_from("<I", head)[0], 4
    if first == _CONTINUES and len(head) == 8:
        first, head_bytes = struct.unpack_from("<I", head, 4)[0], 8
    if first == 0:
        return None
    if first > MAX_METADATA_BYTES:
        raise ValueError("it is no Arrow file, and no stream")
    table = _Table.root(source.read_at(first, offset + head_bytes))
    kind, header, body = table.number(1, "<B"), table.table(2), table.number(3, "<q")
    if body < 0:
        raise ValueError("a message has a body of less than no bytes")
    start = offset + head_bytes + first
    if kind == _DICTIONARY and header is not None:
        header = header.table(1)
    rows = None
    num_bytes = head_bytes + first + body
    if kind in (_DICTIONARY, _BATCH):
        if header is None:
            raise ValueError("a message has no header")
        rows = header.number(0, "<q")
        if rows < 0:
            raise ValueError("a record batch has less than no rows")
        body = _decompressed(source, header, start, body)
    return Message(offset, num_bytes, rows if kind == _BATCH else None, body, kind == _DICTIONARY)


def _decompressed(source: Any, batch: _Table, start: int, body: int) -> int:
    """Return the bytes of a record batch's buffers: where they are compressed, each begins with its size."""
    if batch.table(3) is None:
        return body
    total = 0
    for buffer in batch.structs(2, 16):
        offset, length = struct.unpack("<qq", buffer)
        if length < 8:
            continue
        if offset < 0 or offset + length > body:
            raise ValueError("a buffer of a record batch lies beyond its end")
        size = int(struct.unpack("<q", source.read_at(8, start + offset))[0])
        total += length if size < 0 else size
    return total
