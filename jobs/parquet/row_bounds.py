"""How many rows of a file are decoded at once, so that a batch stays small whatever its pages stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jobs.errors import ShardTooLarge
from jobs.parquet.pages import ChunkSize, Leaf, chunk_size

#: Rows decoded at once: enough to amortise a call, few enough that long texts stay small in memory.
BATCH_ROWS = 1024

#: What a batch may take by the headers of its pages before it has fewer rows, and no more than a share of the
#: limit.
BATCH_BYTES, BATCH_SHARE = 1 << 23, 8

#: Row groups are read together up to so many rows: some writers make them of a few rows each.
STRETCH_ROWS = 8 * BATCH_ROWS

#: The part of its limit that one value may take: pyarrow copies it a few times until it is written.
VALUE_SHARE = 4

#: Times the size of a batch that are in use while it is decoded, rendered or written: pyarrow's buffers grow
#: by doubling, and the batch before it is still there.
COPIES = 4

#: Times its limit that pages may take together: of a file of long documents, or of a hundred columns, they
#: take hundreds of megabytes in any reader.
PAGES_TIMES = 2

#: Times its limit that the rows of a shard may stand for in all, batch after batch: each costs time and disk.
SHARD_TIMES = 16


class Stretch(NamedTuple):
    """Row groups that are read in one go, `rows` at a time.

    row_bytes: what a row takes on average, as far as the pages' headers tell. widest: the column with most
    of it.
    nested: what a PageMeter has to count, because a few rows may hold any number of values.
    held: bytes that reading it takes at most: its pages, and its batches with their copies; for `nested` ones
    the meter tells of more.
    """

    groups: range
    rows: int
    row_bytes: float
    widest: str
    nested: tuple[ChunkSize, ...]
    held: int


class _Group(NamedTuple):
    """One row group. flat_bytes: what a row of the columns that are read takes at most, repeated ones not
    counted; these are `nested`, and take `nested_bytes` together. row_bytes, widest: as in Stretch.
    page_bytes: what the pages that are read take at a time."""

    rows: int
    flat_bytes: float
    nested: list[ChunkSize]
    nested_bytes: float
    row_bytes: float
    widest: str
    page_bytes: int


class Bounds:
    """Sizes up the row groups of a file.

    source: the open file. footer: its FileMetaData. leaves: all of its columns; those that `is_read` are
    decoded. The others are looked at too: a shard that could not be written is refused before its prompts
    are answered. limit: bytes of the pages that are held at a time.
    """

    def __init__(
        self,
        path: str,
        source: Any,
        footer: Any,
        leaves: Sequence[Leaf],
        is_read: Callable[[Leaf], bool],
        limit: int,
    ) -> None:
        self._path, self._source, self._footer = path, source, footer
        self._leaves, self._read, self._limit = leaves, {leaf for leaf in leaves if is_read(leaf)}, limit
        self._batch_bytes = min(BATCH_BYTES, limit // BATCH_SHARE)

    def stretches(self, first_group: int) -> Iterator[Stretch]:
        """Yield the row groups from a first one on. Raises ShardTooLarge or CorruptParquet."""
        groups: list[_Group] = []
        rows, nested_bytes, end = 0, 0.0, self._footer.num_row_groups
        for number in range(first_group, end):
            group = self._sized(number)
            rows, nested_bytes = rows + group.rows, nested_bytes + group.nested_bytes
            if groups and (rows > STRETCH_ROWS or nested_bytes > self._batch_bytes):
                yield self._stretch(range(number - len(groups), number), groups)
                groups, rows, nested_bytes = [], group.rows, group.nested_bytes
            groups.append(group)
        if groups:
            yield self._stretch(range(end - len(groups), end), groups)

    def _sized(self, number: int) -> _Group:
        group = self._footer.row_group(number)
        chunks = [
            chunk_size(self._path, self._source, leaf, group.column(leaf.number)) for leaf in self._leaves
        ]
        self._check(chunks)
        each = [
            chunk.nested_bytes / max(group.num_rows, 1) if chunk.leaf.is_repeated else chunk.mean_bytes
            for chunk in chunks
        ]
        read = [chunk for chunk in chunks if chunk.leaf in self._read]
        nested = [chunk for chunk in read if chunk.leaf.is_repeated]
        return _Group(
            group.num_rows,
            sum(chunk.value_bytes for chunk in read if not chunk.leaf.is_repeated),
            nested,
            sum(chunk.nested_bytes for chunk in nested),
            sum(each),
            self._leaves[each.index(max(each))].path if each else "",
            sum(chunk.page_bytes for chunk in read) + max((chunk.stored_bytes for chunk in read), default=0),
        )

    def _check(self, chunks: Sequence[ChunkSize]) -> None:
        """Raise ShardTooLarge for pages or a value that take too much."""
        if not chunks:
            return
        most = max(chunks, key=lambda chunk: chunk.value_bytes)
        if most.value_bytes > self._limit // VALUE_SHARE:
            what = f"a value of column {most.leaf.path!r} takes {int(most.value_bytes)} bytes"
            raise ShardTooLarge(
                self._path,
                what,
                self._limit // VALUE_SHARE,
                f"1/{VALUE_SHARE} of ",
                "shorten it, or leave it out",
            )
        held = sum(chunk.page_bytes for chunk in chunks) + max(chunk.stored_bytes for chunk in chunks)
        if held > (limit := PAGES_TIMES * self._limit):
            most = max(chunks, key=lambda chunk: chunk.page_bytes)
            what = f"pages of {held} bytes are held at a time, most of them of column {most.leaf.path!r}"
            remedy = "write the file with a smaller row_group_size"
            raise ShardTooLarge(self._path, what, limit, f"{PAGES_TIMES} times ", remedy)

    def _stretch(self, numbers: range, groups: Sequence[_Group]) -> Stretch:
        pages = max(group.page_bytes for group in groups)
        row_bytes = max(group.flat_bytes for group in groups)
        rows = max(1, min(BATCH_ROWS, int(self._batch_bytes / max(1.0, row_bytes))))
        nested_bytes = sum(group.nested_bytes for group in groups)
        nested: tuple[ChunkSize, ...] = ()
        if nested_bytes > self._batch_bytes:
            all_rows = sum(group.rows for group in groups)
            rows = max(1, min(rows, int(self._batch_bytes * all_rows / nested_bytes)))
            nested = tuple(chunk for group in groups for chunk in group.nested)
        widest = max(groups, key=lambda group: group.row_bytes)
        batch = rows * row_bytes + min(nested_bytes, self._batch_bytes)
        return Stretch(numbers, rows, widest.row_bytes, widest.widest, nested, int(pages + COPIES * batch))
