"""What the pages of a column chunk take in memory, read from their headers before any page is.

A footer tells sizes too, but nothing holds it to them, and neither says what a dictionary stands for: a value
of a megabyte is a bit in each row that has it. A page's header is what pyarrow itself allocates by.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from ..errors import CorruptParquet
from .thrift import read_struct

#: Bytes read for a page's header, at first and at most; pyarrow takes no larger one.
HEADER_BYTES = 1 << 8
MAX_HEADER_BYTES = 1 << 24

#: Pages of a column chunk: a writer that keeps to the usual size of 1 MiB makes a hundredth of that.
MAX_PAGES = 100_000

#: A dictionary that is smaller is taken for one entry.
SMALL_BYTES = 1 << 6

#: Entries of a dictionary whose lengths are looked at; one has a few thousand.
MAX_ENTRIES = 1 << 20

#: What a value takes besides its bytes: its offset, and the levels of a nested one.
VALUE_BYTES = 12

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # PageType
_PLAIN_DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY = 2, 7, 8  # Encoding
_LENGTH = struct.Struct("<I").unpack_from


class Page(NamedTuple):
    """What a page's header says.

    start, body: where header and data begin. encoding: -1 for a page of other things than values.
    size, stored: bytes of the data decompressed, and in the file.
    """

    start: int
    body: int
    is_dictionary: bool
    encoding: int
    num_values: int
    size: int
    stored: int


class Leaf(NamedTuple):
    """A column as Parquet stores it: one without columns of its own.

    number: its place in the file. width: bytes of a value of fixed size, None for texts and bytes.
    """

    number: int
    path: str
    width: int | None
    is_repeated: bool


@dataclass(frozen=True)
class ChunkSize:
    """What a column chunk takes in memory.

    page_bytes: the most that its pages take at a time: the dictionary, and the larger one of the pages that
    follow and of itself, before it was taken in.
    stored_bytes: of its largest page as it is in the file; of one column at a time.
    value_bytes: the most that a value takes on average over a page.
    mean_bytes: what a value takes if each entry of the dictionary stands as often as any other.
    pages: of each data page where it begins, and the most that its values take; of repeated columns alone,
    of which a page may belong to one row.
    """

    leaf: Leaf
    page_bytes: int
    stored_bytes: int
    value_bytes: float
    mean_bytes: float
    pages: tuple[tuple[int, float], ...] = ()

    @property
    def nested_bytes(self) -> float:
        """The most that the values of all `pages` take."""
        return sum(cost for _, cost in self.pages)


def leaves(schema: Any) -> list[Leaf]:
    """Return the leaves of pyarrow's ParquetSchema."""
    return [_leaf(number, schema.column(number)) for number in range(len(schema))]


def _leaf(number: int, column: Any) -> Leaf:
    widths = {"BYTE_ARRAY": None, "FIXED_LEN_BYTE_ARRAY": max(column.length, 16), "INT96": 16}
    return Leaf(number, column.path, widths.get(column.physical_type, 8), column.max_repetition_level > 0)


def chunk_size(path: str, file: Any, leaf: Leaf, chunk: Any) -> ChunkSize:
    """Size up a column chunk. file: opened for reading. chunk: its pyarrow ColumnChunkMetaData.

    Raises CorruptParquet.
    """
    pages = list(_pages(path, file, leaf, chunk))
    data = [page for page in pages if not page.is_dictionary]
    tables = [page for page in pages if page.is_dictionary]
    entry = 0
    if leaf.width is None and any(page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY) for page in data):
        entry = max((_longest_entry(file, chunk, page) for page in tables), default=0)
    costs = [_value_bytes(leaf, page, entry) for page in data]
    return ChunkSize(
        leaf,
        sum(page.size for page in tables) + max((page.size for page in pages), default=0),
        max((page.stored for page in pages), default=0),
        max(costs, default=0.0),
        max((_mean_bytes(leaf, page, tables) for page in data), default=0.0),
        tuple((page.start, page.num_values * cost) for page, cost in zip(data, costs, strict=True))
        if leaf.is_repeated
        else (),
    )


def _value_bytes(leaf: Leaf, page: Page, entry: int) -> float:
    """Return the most that a value of a page takes; where none can stand for more than it stores, on average.

    entry: the longest one of the dictionary.
    """
    if leaf.width is not None:
        return VALUE_BYTES + leaf.width
    if page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
        return VALUE_BYTES + entry
    if page.encoding == _DELTA_BYTE_ARRAY:  # a value may begin like the one before it, all of the page's text
        return VALUE_BYTES + page.size
    return VALUE_BYTES + page.size / max(page.num_values, 1)


def _mean_bytes(leaf: Leaf, page: Page, tables: Sequence[Page]) -> float:
    """Return what a value of a page takes on average, as far as that shows before it is decoded."""
    if leaf.width is not None:
        return VALUE_BYTES + leaf.width
    if page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
        return VALUE_BYTES + max((table.size / max(table.num_values, 1) for table in tables), default=0.0)
    return VALUE_BYTES + page.size / max(page.num_values, 1)


def _pages(path: str, file: Any, leaf: Leaf, chunk: Any) -> Iterator[Page]:
    """Yield the pages that pyarrow would read, in order. Raises CorruptParquet."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    seen = count = 0
    while seen < chunk.num_values:
        page = _page(path, file, leaf, start)
        count += 1
        if count > MAX_PAGES:
            raise CorruptParquet(path, f"column {leaf.path!r} has more than {MAX_PAGES} pages in a row group")
        if page is None:
            raise CorruptParquet(path, f"the pages of column {leaf.path!r} end early")
        start = page.body + page.stored
        if page.encoding < 0:
            continue
        if not page.is_dictionary:
            seen += page.num_values
        yield page


def _page(path: str, file: Any, leaf: Leaf, start: int) -> Page | None:
    """Read the header of the page at a place; None where the file ends there."""
    size = HEADER_BYTES
    while True:
        data = file.read_at(size, start)
        try:
            fields, length = read_struct(data)
            break
        except IndexError:
            if len(data) < size:
                return None
            if size >= MAX_HEADER_BYTES:
                raise CorruptParquet(path, f"a page header of column {leaf.path!r} does not end") from None
            size *= 16
        except ValueError as error:
            raise CorruptParquet(path, f"a page header of column {leaf.path!r}: {error}") from None
    kind = fields.get(1, -1)
    head = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, 0), {})
    found = Page(
        start=start,
        body=start + length,
        is_dictionary=kind == _DICTIONARY,
        encoding=head.get(4 if kind == _DATA_V2 else 2, -1),
        num_values=head.get(1, 0),
        size=fields.get(2, 0),
        stored=fields.get(3, 0),
    )
    if min(found.num_values, found.size, found.stored) < 0:
        raise CorruptParquet(path, f"a page header of column {leaf.path!r} has a negative size")
    return found


def _longest_entry(file: Any, chunk: Any, page: Page) -> int:
    """Return the bytes of a dictionary's longest text, or of all its texts where that is not known."""
    if page.size <= SMALL_BYTES or page.num_values > MAX_ENTRIES:
        return page.size
    if chunk.compression == "LZ4":  # two codecs go by that name
        return page.size
    data = file.read_at(page.stored, page.body)
    try:
        if chunk.compression != "UNCOMPRESSED":
            data = pa.decompress(data, page.size, chunk.compression.lower(), asbytes=True)
        return min(_longest(data, page.num_values), page.size)
    except (ValueError, OSError, pa.ArrowException, struct.error):  # as pyarrow will find
        return page.size


def _longest(data: bytes, count: int) -> int:
    """Return the length of the longest of so many texts, each behind its length in four bytes."""
    longest = at = 0
    for _ in range(count):
        (length,) = _LENGTH(data, at)
        at += 4 + length
        if length > longest:
            longest = length
    return longest
