"""What the pages of a column chunk take in memory, read from their headers before any page is.

A footer tells sizes too, but nothing holds it to them, and neither says what a dictionary stands for: a value
of a megabyte is a bit in each row that has it. A page's header is what pyarrow itself allocates by.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from jobs.errors import CorruptParquet
from jobs.parquet.dictionary_use import behind_levels, bytes_of_values
from jobs.parquet.thrift import read_struct

#: Bytes read for a page's header, at first and at most; pyarrow takes no larger one.
HEADER_BYTES = 1 << 8
MAX_HEADER_BYTES = 1 << 24

#: No file is so long; a place beyond it, or before the file, is an error of the operating system's.
MAX_PLACE = 1 << 62

#: Pages of a column chunk: a writer that keeps to the usual size of 1 MiB makes a hundredth of that.
MAX_PAGES = 100_000

#: A dictionary that is smaller is taken for one entry.
SMALL_BYTES = 1 << 6

#: Entries of a dictionary whose lengths are looked at; one has a few thousand.
MAX_ENTRIES = 1 << 20

#: Bytes that a repeated chunk may take with the longest entry in every place, before its references
#: are looked at; and bytes of its pages that are decompressed for that.
LOOK_FROM, LOOK_BYTES = 1 << 23, 1 << 26

#: What a value takes besides its bytes: its offset, and the levels of a nested one.
VALUE_BYTES = 12

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # PageType
_PLAIN_DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY = 2, 7, 8  # Encoding
_REFERENCES = (_PLAIN_DICTIONARY, _RLE_DICTIONARY)
_RLE = 3
_LENGTH = struct.Struct("<I").unpack_from
_UNREADABLE = (ValueError, IndexError, OSError, pa.ArrowException, struct.error)
_NO_HEAD: Final[dict[int, Any]] = {}

T = TypeVar("T")


class Page(NamedTuple):
    """What a page's header says.

    start, body: where header and data begin. encoding: -1 for a page of other things than values.
    size, stored: bytes of the data decompressed, and in the file.
    levels: bytes of the levels before the data, never compressed; None where they are a part of it, -1 where
    they are of an encoding that nobody writes any more.
    is_compressed: with the chunk's codec.
    """

    start: int
    body: int
    is_dictionary: bool
    encoding: int
    num_values: int
    size: int
    stored: int
    levels: int | None
    is_compressed: bool


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
    entry, lengths = 0, None
    if leaf.width is None and any(page.encoding in _REFERENCES for page in data):
        lengths = [_entry_lengths(file, chunk, page) for page in tables]
        entry = max(
            (max(each) if each else page.size for each, page in zip(lengths, tables, strict=True)), default=0
        )
    costs = [_value_bytes(leaf, page, entry) for page in data]
    return ChunkSize(
        leaf,
        sum(page.size for page in tables) + max((page.size for page in pages), default=0),
        max((page.stored for page in pages), default=0),
        max(costs, default=0.0),
        max((_mean_bytes(leaf, page, tables) for page in data), default=0.0),
        _page_costs(file, chunk, data, costs, lengths) if leaf.is_repeated else (),
    )


def _page_costs(
    file: Any,
    chunk: Any,
    data: Sequence[Page],
    costs: Sequence[float],
    lengths: Sequence[Sequence[int]] | None,
) -> tuple[tuple[int, float], ...]:
    """Return where each page begins and the most that its values take. costs: of a value, at most.

    lengths: of the entries of each dictionary. Where one is far longer than the others, the references tell
    how often it stands.
    """
    most = [page.num_values * cost for page, cost in zip(data, costs, strict=True)]
    looked_at = sum(page.size for page in data if page.encoding in _REFERENCES)
    if lengths and len(lengths) == 1 and lengths[0] and sum(most) > LOOK_FROM and looked_at <= LOOK_BYTES:
        entries = np.array(lengths[0], np.int64)
        for number, page in enumerate(data):
            if page.encoding in _REFERENCES:
                most[number] = _referenced_bytes(file, chunk, page, entries, most[number])
    return tuple((page.start, each) for page, each in zip(data, most, strict=True))


def _referenced_bytes(file: Any, chunk: Any, page: Page, entries: Any, most: float) -> float:
    """Return what a page's values take by its references, `most` where they cannot be read."""
    if page.levels is not None and page.levels < 0:
        return most
    ahead = page.levels or 0
    part = page._replace(body=page.body + ahead, size=page.size - ahead, stored=page.stored - ahead)
    try:
        body = _decompressed(file, chunk, part)
        if page.levels is None:
            body = behind_levels(body, num_levels=2)
        used = bytes_of_values(body, page.num_values, entries)
    except _UNREADABLE:  # as pyarrow will find
        return most
    return VALUE_BYTES * page.num_values + used


def _value_bytes(leaf: Leaf, page: Page, entry: int) -> float:
    """Return the most that a value of a page takes; where none can stand for more than it stores, on average.

    entry: the longest one of the dictionary.
    """
    if leaf.width is not None:
        return VALUE_BYTES + leaf.width
    if page.encoding in _REFERENCES:
        return VALUE_BYTES + entry
    if page.encoding == _DELTA_BYTE_ARRAY:  # a value may begin like the one before it, all of the page's text
        return VALUE_BYTES + page.size
    return VALUE_BYTES + page.size / max(page.num_values, 1)


def _mean_bytes(leaf: Leaf, page: Page, tables: Sequence[Page]) -> float:
    """Return what a value of a page takes on average, as far as that shows before it is decoded."""
    if leaf.width is not None:
        return VALUE_BYTES + leaf.width
    if page.encoding in _REFERENCES:
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
    if not 0 <= start < MAX_PLACE:
        raise CorruptParquet(path, f"a page of column {leaf.path!r} begins at byte {start}, outside the file")
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
    kind = _field(fields, 1, -1)
    head = _field(fields, {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, 0), _NO_HEAD)
    found = Page(
        start=start,
        body=start + length,
        is_dictionary=kind == _DICTIONARY,
        encoding=_field(head, 4 if kind == _DATA_V2 else 2, -1),
        num_values=_field(head, 1, 0),
        size=_field(fields, 2, 0),
        stored=_field(fields, 3, 0),
        levels=_levels(kind, head),
        is_compressed=kind != _DATA_V2 or _field(head, 7, True),
    )
    if min(found.num_values, found.size, found.stored) < 0:
        raise CorruptParquet(path, f"a page header of column {leaf.path!r} has a negative size")
    return found


def _field(fields: Mapping[int, Any], number: int, default: T) -> T:
    """Return a field; the default where there is none, or one of another type, which pyarrow passes over."""
    value = fields.get(number)
    return value if type(value) is type(default) else default


def _levels(kind: int, head: Mapping[int, Any]) -> int | None:
    """Return a Page's `levels`."""
    if kind == _DATA_V2:
        sizes = _field(head, 5, 0), _field(head, 6, 0)
        return sum(sizes) if min(sizes) >= 0 else -1
    return None if head.get(3) == _RLE and head.get(4) == _RLE else -1


def _entry_lengths(file: Any, chunk: Any, page: Page) -> Sequence[int]:
    """Return the bytes of each text of a dictionary; nothing where they are not known."""
    if page.size <= SMALL_BYTES or page.num_values > MAX_ENTRIES:
        return ()
    try:
        return _lengths(_decompressed(file, chunk, page), page.num_values)
    except _UNREADABLE:  # as pyarrow will find
        return ()


def _decompressed(file: Any, chunk: Any, page: Page) -> bytes:
    """Return a page's data. Raises ValueError and what pyarrow raises."""
    if chunk.compression == "LZ4":
        raise ValueError("two codecs go by that name")
    data: bytes = file.read_at(page.stored, page.body)
    if chunk.compression != "UNCOMPRESSED" and page.is_compressed:
        data = pa.decompress(data, page.size, chunk.compression.lower(), asbytes=True)
    return data


def _lengths(data: bytes, count: int) -> Sequence[int]:
    """Return the lengths of so many texts, each behind its length in four bytes. Raises ValueError."""
    lengths, at = array("q"), 0
    for _ in range(count):
        (length,) = _LENGTH(data, at)
        at += 4 + length
        lengths.append(length)
    if at > len(data):
        raise ValueError("the texts are longer than their page")
    return lengths
