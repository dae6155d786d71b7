"""What a page's values take when each of them is a reference to an entry of the column's dictionary.

A page says how many values it has, and not which entries they stand for: one long entry among short ones may
stand once or in every place. The references tell, and are small. Source: the Parquet format, "Encodings"
(RLE and bit-packing hybrid, dictionary encoding) and "Data pages".
"""

from __future__ import annotations

import numpy as np

from jobs.parquet.thrift import varint

#: References unpacked at a time.
SLICE = 1 << 16

_MAX_BIT_WIDTH = 32


def bytes_of_values(body: bytes, num_values: int, lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return the bytes of the entries that the first `num_values` references name, nulls not left out.

    body: the page's data from the bit width on. lengths: bytes of each entry. Raises ValueError or IndexError
    where it is no such page.
    """
    width = body[0]
    if width > _MAX_BIT_WIDTH:
        raise ValueError(f"references of {width} bits")
    at, left, total = 1, num_values, 0
    while left > 0 and at < len(body):
        head, at = varint(body, at, bits=32)
        if head & 1:
            count = min((head >> 1) * 8, left)
            total += _packed_bytes(body[at : at + (head >> 1) * width], count, width, lengths)
            at += (head >> 1) * width
        else:
            count = min(head >> 1, left)
            size = (width + 7) // 8
            total += count * int(lengths[int.from_bytes(body[at : at + size], "little")])
            at += size
        left -= count
    return total


def behind_levels(body: bytes, num_levels: int) -> bytes:
    """Return what follows the levels of a page of version 1, each behind its length in four bytes."""
    at = 0
    for _ in range(num_levels):
        at += 4 + int.from_bytes(body[at : at + 4], "little")
    return body[at:]


def _packed_bytes(
    packed: bytes, count: int, width: int, lengths: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> int:
    if width == 0:
        return count * int(lengths[0])
    weights = 1 << np.arange(width, dtype=np.int64)
    total = 0
    for start in range(0, count, SLICE):  # a multiple of 8 references: it begins with a byte
        part = packed[start * width // 8 : (start + SLICE) * width // 8]
        bits = np.unpackbits(np.frombuffer(part, np.uint8), bitorder="little")
        rows = len(bits) // width
        references = bits[: rows * width].reshape(rows, width) @ weights
        total += int(lengths[references[: count - start]].sum())
    return total
