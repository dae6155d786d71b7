"""Reads text files in encodings other than UTF-8. Recognizes such files if no encoding was named."""

import codecs
import io
import re
from typing import Any

from jobs.errors import CorruptTable, MarkedAsUTF8, OtherEncoding

CHUNK_BYTES = 1 << 20
#: Byte order marks of other encodings. Longer marks come first, because they may begin with a shorter mark.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: How many bytes of a file to look at. In UTF-16 without a mark, nearly every second of these bytes is zero.
_HEAD_BYTES = 4096
#: A byte above 127 beside a letter, as in words in cp1252. In data that is not text, such a byte may stand anywhere.
_IN_WORD = re.compile(rb"[A-Za-z][\x80-\xff]|[\x80-\xff][A-Za-z]")
#: The handler for bytes that the encoding does not have. It makes their line invalid UTF-8, and the row is lost.
_BAD = "tokenmill-bad"
_INVALID_BYTE = "\udcff"  # becomes the byte 255


def _invalid_byte(error: UnicodeError) -> tuple[str, int]:
    """Return what stands for bytes that cannot be decoded, and the position at which decoding goes on."""
    return _INVALID_BYTE, getattr(error, "end", 0)


codecs.register_error(_BAD, _invalid_byte)


class EncodingGuess:
    """Guesses a file's encoding from its lines if they are not UTF-8."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._has_utf8 = False  # whether a line has non-ASCII characters in UTF-8
        self._has_cp1252 = False  # whether a line looks like cp1252

    def begin(self, head: bytes) -> None:
        """Look at a file's first bytes. Raises OtherEncoding if they seem to be UTF-16 or UTF-32."""
        for mark, encoding in _MARKS:
            if head.startswith(mark):
                raise OtherEncoding(self._path, encoding)
        head = head[:_HEAD_BYTES]
        # Most letters have a code below 256. In UTF-16, the high byte of such a letter is zero.
        even_bytes = head[::2]
        odd_bytes = head[1::2]
        for high_bytes, low_bytes, encoding in (
            (odd_bytes, even_bytes, "utf-16-le"),
            (even_bytes, odd_bytes, "utf-16-be"),
        ):
            has_enough_letters = len(high_bytes) > 3
            most_are_zero = high_bytes.count(0) > len(high_bytes) // 2
            if has_enough_letters and most_are_zero and 0 not in low_bytes:
                raise OtherEncoding(self._path, encoding)

    def see(self, line: bytes) -> None:
        """Look at one line."""
        if self._has_utf8 or line.isascii():
            return
        try:
            line.decode()
            self._has_utf8 = True
        except UnicodeDecodeError:
            if _looks_like_cp1252(line):
                self._has_cp1252 = True

    @property
    def seems_cp1252(self) -> bool:
        """Whether a line looks like cp1252, and no line has non-ASCII characters in UTF-8."""
        return self._has_cp1252 and not self._has_utf8

    def check(self) -> None:
        """Raise OtherEncoding if the lines seem to be cp1252."""
        if self.seems_cp1252:
            raise OtherEncoding(self._path, "cp1252")


def _looks_like_cp1252(line: bytes) -> bool:
    """Whether a line that is not UTF-8 looks like words in cp1252."""
    try:
        line.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return _IN_WORD.search(line) is not None


class Decoded(io.RawIOBase):
    """Turns a stream in some encoding into UTF-8. Bytes that are invalid in the encoding become invalid UTF-8.

    Reading raises CorruptTable if the encoding needs a byte order mark and the stream has none. Reading raises
    MarkedAsUTF8 if the stream begins with UTF-8's byte order mark, but the encoding would read this mark as three
    letters. path, file_format: the errors show them.
    """

    def __init__(self, stream: Any, encoding: str, path: str, file_format: str) -> None:
        self._stream = stream
        make_decoder = codecs.getincrementaldecoder(encoding)
        self._decoder = make_decoder(errors=_BAD)
        self._encoding = encoding
        self._path = path
        self._format = file_format
        self._unread = b""  # UTF-8 that was not read from this object yet
        self._has_begun = False  # whether a chunk of the stream was read
        self._is_over = False  # whether the stream has ended

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read UTF-8 into a buffer; return how many bytes."""
        while not self._unread and not self._is_over:
            chunk = self._stream.read(CHUNK_BYTES)
            self._is_over = not chunk
            has_utf8_mark = not self._has_begun and chunk.startswith(codecs.BOM_UTF8)
            if has_utf8_mark and self._has_single_bytes():
                raise MarkedAsUTF8(self._path, self._encoding)
            self._has_begun = True
            try:
                text = self._decoder.decode(chunk, self._is_over)
            except UnicodeError:
                name = self._encoding
                reason = (
                    f"it has no byte order mark, which encoding {name} needs: "
                    f"if it is written as {name}-le or {name}-be, name that encoding"
                )
                raise CorruptTable(self._path, self._format, reason) from None
            self._unread = text.encode("utf-8", "surrogateescape")
        num_bytes = min(len(buffer), len(self._unread))
        buffer[:num_bytes] = self._unread[:num_bytes]
        self._unread = self._unread[num_bytes:]
        return num_bytes

    def _has_single_bytes(self) -> bool:
        """Whether this encoding reads UTF-8's byte order mark as three letters, one for each byte."""
        mark = codecs.BOM_UTF8
        return len(mark.decode(self._encoding, errors="replace")) == len(mark)
