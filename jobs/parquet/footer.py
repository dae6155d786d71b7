"""How large a Parquet file's footer may be, looked at before pyarrow parses it."""

from __future__ import annotations

from typing import Any

from jobs.errors import CorruptParquet, FooterTooLarge
from jobs.parquet.footer_cost import FooterCost

#: A footer takes about 120 bytes for each column of each row group: this one has room for 100,000 of them.
MAX_FOOTER_BYTES = 1 << 24

_TAIL_BYTES = 8  # at a file's end: the footer's length, and Parquet's mark
_MARK, _ENCRYPTED_MARK = b"PAR1", b"PARE"


def check_footer(path: str, source: Any, limit: int) -> None:
    """Raise FooterTooLarge for a footer of too many bytes, or of more than `limit` once it is parsed.

    source: opened for reading. Raises CorruptParquet for what is no footer, where pyarrow would not.
    """
    size = source.size()
    tail = source.read_at(_TAIL_BYTES, max(0, size - _TAIL_BYTES))
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] not in (_MARK, _ENCRYPTED_MARK) or length > size - _TAIL_BYTES:
        return  # pyarrow says what is wrong with it
    if length > MAX_FOOTER_BYTES:
        raise FooterTooLarge(path, f"has {length} bytes", str(MAX_FOOTER_BYTES))
    if tail[4:] == _ENCRYPTED_MARK:
        return  # pyarrow refuses it
    try:
        FooterCost(path, source.read_at(length, size - _TAIL_BYTES - length), limit)
    except (IndexError, ValueError) as error:
        raise CorruptParquet(path, f"its footer cannot be read: {error}") from None
