"""Puts rows together into row groups, and sorts rows.

Small batches are joined, because a footer with many small row groups takes longer to read than the rows. Rows are
sorted on this machine's disk, with few rows in memory at a time.
"""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

T = TypeVar("T")
#: A row group ends after this many rows.
GROUP_ROWS = 1 << 16
#: A row group ends after this many bytes. The batches that a worker gets have about this many bytes at most.
GROUP_BYTES = 1 << 23


def write_groups(
    sink: Any, schema: pa.Schema | None, batches: Iterable[pa.RecordBatch]
) -> list[int]:
    """Write rows as Parquet; return the number of rows of each row group.

    schema: the rows' schema. If it is None, the schema of the first batch is used, so there must be at least one row.
    """
    all_pieces = chain.from_iterable(map(pieces, batches))
    slices = ((piece.num_rows, piece.nbytes, piece) for piece in all_pieces)
    groups = grouped(slices)
    # The first group shows the schema. `first_groups` is empty if there are no rows.
    first_groups = list(islice(groups, 1))
    if schema is None:
        [(_, _, first_pieces)] = first_groups
        schema = first_pieces[0].schema

    rows_of_groups: list[int] = []
    with pq.ParquetWriter(sink, schema) as writer:
        # `groups` goes on with the second group.
        for num_rows, _, group_pieces in chain(first_groups, groups):
            writer.write_table(pa.Table.from_batches(group_pieces))
            rows_of_groups.append(num_rows)
    return rows_of_groups


def grouped(slices: Iterable[tuple[int, int, T]]) -> Iterator[tuple[int, int, list[T]]]:
    """Yield row groups, each of one or more slices.

    A slice is (rows, bytes, content). A group is (rows, bytes, contents of its slices).
    """
    group_rows = 0
    group_bytes = 0
    group: list[T] = []
    for slice_rows, slice_bytes, content in slices:
        group.append(content)
        group_rows += slice_rows
        group_bytes += slice_bytes
        if group_rows >= GROUP_ROWS or group_bytes >= GROUP_BYTES:
            yield group_rows, group_bytes, group
            group_rows = 0
            group_bytes = 0
            group = []
    if group:
        yield group_rows, group_bytes, group


def packed(batch: pa.RecordBatch) -> memoryview:
    """Return a batch in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in pieces of about GROUP_BYTES at most. All pieces but the last have the same number of rows."""
    batch_bytes = max(GROUP_BYTES, batch.nbytes)  # a small batch is one piece
    piece_rows = max(1, batch.num_rows * GROUP_BYTES // batch_bytes)
    return (batch.slice(start, piece_rows) for start in range(0, batch.num_rows, piece_rows))


#: The fewest places that belong to a bucket.
BUCKET_ROWS = 1 << 12
MAX_BUCKETS = 256
#: Rows are collected until they are more than this many rows or bytes, and are then written to the buckets' files.
BATCH_ROWS = 1 << 16
BATCH_BYTES = 1 << 25
#: The most rows that are read from a bucket at once.
READ_ROWS = 1 << 14

_PLACE = pa.field("\0place", pa.int64())


class RowBuckets(ExitStack):
    """Takes rows in any order, and yields the rows in the order of their places. Use it in a `with` block.

    A place is a number that the caller gives a row. A bucket is a file of rows whose places are near each other.
    num_places: all places are from 0 to `num_places` - 1.
    """

    def __init__(self, num_places: int) -> None:
        super().__init__()
        #: How many places belong to one bucket. A place is the number by which a row is sorted.
        self._places_per_bucket = max(BUCKET_ROWS, math.ceil(num_places / MAX_BUCKETS))
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        #: The path of each bucket's file and the stream that writes into it, by the bucket's number.
        self._streams: dict[int, tuple[str, Any]] = {}
        self._folder = self.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-"))

    def add(self, places: npt.NDArray[np.int64], batch: pa.RecordBatch) -> None:
        """Take rows. places: for each row, the number by which the rows are sorted."""
        schema = batch.schema.append(_PLACE)
        with_places = pa.RecordBatch.from_arrays([*batch.columns, pa.array(places)], schema=schema)
        self._waiting.append(with_places)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += int(batch.nbytes)
        if self._waiting_rows > BATCH_ROWS or self._waiting_bytes > BATCH_BYTES:
            self._flush()

    def sorted(self) -> Iterator[pa.Table]:
        """Yield all rows in the order of their places. May be called once."""
        self._flush()
        for bucket in sorted(self._streams):
            path, stream = self._streams[bucket]
            stream.close()
            with pa.memory_map(path) as source:
                yield from _in_order(pa.ipc.open_stream(source).read_all())
            os.remove(path)

    def _flush(self) -> None:
        """Write the waiting rows to the buckets' files."""
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        self._waiting = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        # bucket_of_row[i]: the number of the bucket of row i
        bucket_of_row = table[_PLACE.name].to_numpy() // self._places_per_bucket
        for bucket in map(int, np.unique(bucket_of_row)):
            if bucket not in self._streams:
                path = os.path.join(self._folder, str(bucket))
                stream = self.enter_context(pa.ipc.new_stream(path, table.schema))
                self._streams[bucket] = (path, stream)
            _, stream = self._streams[bucket]
            is_in_bucket = pa.array(bucket_of_row == bucket)
            stream.write_table(table.filter(is_in_bucket))


def _in_order(table: pa.Table) -> Iterator[pa.Table]:
    """Yield a bucket's rows sorted by their column _PLACE, a few rows at a time."""
    order_of_rows = np.argsort(table[_PLACE.name].to_numpy())
    ranks = np.argsort(order_of_rows)  # ranks[i]: the number of row i in the sorted table
    rows_in_batch_bytes = len(ranks) * BATCH_BYTES // max(1, table.nbytes)
    num_rows = min(READ_ROWS, max(1, rows_in_batch_bytes))
    # `take` joins the chunks of a column, and a joined column holds at most 2 GiB of text. So the next few rows are
    # first picked by their ranks, and only these rows are sorted with `take`.
    for start in range(0, len(ranks), num_rows):
        is_next = (ranks >= start) & (ranks < start + num_rows)
        next_rows = table if is_next.all() else table.filter(pa.array(is_next))
        order = np.argsort(next_rows[_PLACE.name].to_numpy())
        yield next_rows.take(order).drop_columns([_PLACE.name])
