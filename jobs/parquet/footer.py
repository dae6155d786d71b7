"""How large a Parquet file's footer may be, looked at before pyarrow parses it."""

from __future__ import annotations

from typing import Any

from ..errors import CorruptParquet

#: A footer takes about 120 bytes for each column of each row group: this one has room for 100,000 of them.
MAX_FOOTER_BYTES = 1 << 24

#: Row groups of a file, or columns of a row group.
MAX_FOOTER_ITEMS = 1 << 17

_TAIL_BYTES = 8  # at a file's end: the footer's length, and Parquet's mark


def check_footer(path: str, source: Any) -> None:
    """Raise CorruptParquet for a footer that is too large. source: opened for reading."""
    size = source.size()
    if size < _TAIL_BYTES:
        return  # pyarrow says what is wrong with it
    length = int.from_bytes(source.read_at(4, size - _TAIL_BYTES), "little")
    if length > MAX_FOOTER_BYTES:
        raise CorruptParquet(path, f"its footer would have {length} bytes, more than {MAX_FOOTER_BYTES}")
