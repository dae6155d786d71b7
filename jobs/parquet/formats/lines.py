"""The lines of a text file, from the beginning of a block on, compressed or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.errors import CorruptTable
from jobs.runs.plans.plan import Block

#: Bytes of one line: room for a prompt of the largest size, however its letters are written.
MAX_LINE_BYTES = 8 << 20

CHUNK_BYTES = 1 << 20

#: How compressed files begin: no text does.
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
_UTF8_MARK, _UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


class Line(NamedTuple):
    """A line without its end. number: counted from 1. end: the byte behind it, in a compressed file that of
    its text. text: None where it has more than MAX_LINE_BYTES."""

    number: int
    end: int
    text: bytes | None

    @property
    def behind(self) -> Block:
        """Where the next line begins."""
        return Block(self.end, self.number + 1)


@contextmanager
def text_stream(source: Any) -> Iterator[Any]:
    """Lend an open file as pyarrow reads it, decompressed where its first bytes tell that it is compressed.

    source: a pyarrow file at its beginning.
    """
    codec = codec_of(source)
    source.seek(0)
    if codec is None:
        yield source
        return
    with pa.CompressedInputStream(source, codec) as stream:
        yield stream


def codec_of(source: Any) -> str | None:
    """Return how an open file is compressed, None where it is not. source: as of text_stream."""
    head = source.read_at(4, 0)
    return next((name for mark, name in _CODECS.items() if head.startswith(mark)), None)


def lines_from(path: str, stream: Any, block: Block) -> Iterator[Line]:
    """Yield the lines from a block on. stream: as text_stream lends it, not read yet.

    Raises CorruptTable for text in UTF-16, and what pyarrow raises for a damaged compressed file.
    """
    _go_to(stream, block.byte)
    number, end = block.line, block.byte
    rest, is_too_long = b"", False
    while chunk := stream.read(CHUNK_BYTES):
        if end == 0 and not rest:
            if chunk.startswith(_UTF16_MARKS):
                raise CorruptTable(path, "text", "it is UTF-16, expected UTF-8")
            if chunk.startswith(_UTF8_MARK):
                chunk, end = chunk.removeprefix(_UTF8_MARK), len(_UTF8_MARK)
        first, *others = chunk.split(b"\n")
        for following in others:
            is_too_long = is_too_long or len(rest) + len(first) > MAX_LINE_BYTES
            end += len(rest) + len(first) + 1
            yield Line(number, end, None if is_too_long else rest + first)
            number, rest, is_too_long, first = number + 1, b"", False, following
        if is_too_long or len(rest) + len(first) > MAX_LINE_BYTES:
            end, rest, is_too_long = end + len(rest) + len(first), b"", True
        else:
            rest += first
    if rest or is_too_long:
        yield Line(number, end + len(rest), None if is_too_long else rest)


def _go_to(stream: Any, byte: int) -> None:
    if stream.seekable():
        stream.seek(byte)
        return
    while byte > 0 and (skipped := len(stream.read(min(byte, CHUNK_BYTES)))):
        byte -= skipped
