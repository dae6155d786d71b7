"""The encoding of text files: another one than UTF-8 is turned into it, or seen by its bytes and named."""

import codecs
import io
import re
from typing import Any

from jobs.errors import OtherEncoding

CHUNK_BYTES = 1 << 20
#: Marks with which files of other encodings begin, the longer ones first.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: Bytes that tell whether each second one is zero, as in UTF-16 without a mark.
_HEAD_BYTES = 4096
#: A byte above 127 beside a letter, as cp1252 writes words; bytes that are no text stand anywhere.
_IN_WORD = re.compile(rb"[A-Za-z][\x80-\xff]|[\x80-\xff][A-Za-z]")
#: What a byte becomes that the encoding has not: its line is no UTF-8, and costs its row.
_BAD = "tokenmill-bad"
codecs.register_error(_BAD, lambda error: ("\udcff", getattr(error, "end", 0)))


class EncodingGuess:
    """Sees the lines of a file that should be UTF-8, and says what else it looks like."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_utf8 = self._is_cp1252 = False

    def begin(self, head: bytes) -> None:
        """Look at a file's first bytes. Raises OtherEncoding."""
        for mark, encoding in _MARKS:
            if head.startswith(mark):
                raise OtherEncoding(self._path, encoding)
        head = head[:_HEAD_BYTES]
        for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
            zeros, others = head[first::2], head[1 - first :: 2]
            if len(zeros) > 3 and zeros.count(0) > len(zeros) // 2 and not others.count(0):
                raise OtherEncoding(self._path, encoding)

    def see(self, line: bytes) -> None:
        if self._is_utf8 or line.isascii():
            return
        try:
            line.decode()
            self._is_utf8 = True
        except UnicodeDecodeError:
            self._is_cp1252 = self._is_cp1252 or _looks_like_cp1252(line)

    def check(self) -> None:
        """Raise OtherEncoding where no line had letters in UTF-8, and some line had them in cp1252."""
        if self._is_cp1252 and not self._is_utf8:
            raise OtherEncoding(self._path, "cp1252")


def _looks_like_cp1252(line: bytes) -> bool:
    try:
        line.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return _IN_WORD.search(line) is not None


class Decoded(io.RawIOBase):
    """A stream of text in some encoding as one of UTF-8. Bytes that the encoding has not are no UTF-8 either."""

    def __init__(self, stream: Any, encoding: str) -> None:
        self._stream, self._decoder = stream, codecs.getincrementaldecoder(encoding)(_BAD)
        self._left, self._is_over = b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and not self._is_over:
            read = self._stream.read(CHUNK_BYTES)
            self._is_over = not read
            text = self._decoder.decode(read, self._is_over)
            self._left = text.encode("utf-8", "surrogateescape")
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size
