"""The bytes of a journal: a header that says whose it is, and records of JSON with a checksum over all."""

import json
import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

_MAGIC = b"TKMJRNL1"
_DIGEST_BYTES = 16
_LENGTH, _RECORD = struct.Struct("<H"), struct.Struct("<cI")
_HEADER_BYTES = len(_MAGIC) + _DIGEST_BYTES + _LENGTH.size

#: Of all of it, and of a record: whoever may write there must not fill the reader's memory. Parsed, the smallest
#: lists of JSON take 27 times their text.
MAX_BYTES, MAX_RECORD_BYTES = 64 << 20, 4 << 20


class JournalUnfit(ValueError):
    """Raised for bytes that are no journal, a damaged one, or another's."""


def packed(whose: str, records: Iterable[tuple[bytes, str]], most: int = MAX_BYTES) -> bytes:
    """Return a journal of records, of a kind of one byte and JSON each. Those beyond the bounds are left out."""
    named = whose.encode()
    pieces, size = [_LENGTH.pack(len(named)), named], _HEADER_BYTES + len(named)
    for kind, text in records:
        record = text.encode()
        size += _RECORD.size + len(record)
        if size > most:
            break
        if len(record) <= MAX_RECORD_BYTES:
            pieces += [_RECORD.pack(kind, len(record)), record]
    body = b"".join(pieces)
    return _MAGIC + _digest(body) + body


def unpacked(contents: bytes, whose: str) -> Iterator[tuple[bytes, Any]]:
    """Yield the records of a journal. Raises JournalUnfit."""
    if len(contents) < _HEADER_BYTES or not contents.startswith(_MAGIC):
        raise JournalUnfit("it is no journal of this version")
    body = memoryview(contents)[len(_MAGIC) + _DIGEST_BYTES :]
    if _digest(body) != contents[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]:
        raise JournalUnfit("it is damaged")
    (length,) = _LENGTH.unpack_from(body)
    place = _LENGTH.size + length
    if bytes(body[_LENGTH.size : place]) != whose.encode():
        raise JournalUnfit("it is of another plan or model")
    while place < len(body):
        try:
            kind, length = _RECORD.unpack_from(body, place)
            place += _RECORD.size
            if length > MAX_RECORD_BYTES or place + length > len(body):
                raise ValueError
            yield kind, json.loads(bytes(body[place : place + length]))
        except (struct.error, ValueError, RecursionError):
            raise JournalUnfit("a record is no JSON") from None
        place += length


def _digest(body: bytes | memoryview) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
