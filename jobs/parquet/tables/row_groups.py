"""Puts rows together into row groups of a size, and sorts rows.

Row groups are not too small, because a footer with many row groups takes longer to read than the rows. Rows are sorted
on this machine's disk, with few rows in memory at a time.
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
#: A row group ends after this many bytes. The batches that a worker gets have at most as many.
GROUP_BYTES = 1 << 23


def write_groups(
    sink: Any, schema: pa.Schema | None, batches: Iterable[pa.RecordBatch]
) -> list[int]:
    """Write rows as Parquet; return the number of rows of each row group.

    schema: the rows' schema; None for the first batch's. Needed if there may be no rows.
    """
    all_pieces = chain.from_iterable(map(pieces, batches))
    slices = ((piece.num_rows, piece.nbytes, piece) for piece in all_pieces)
    groups = grouped(slices)
    first_groups = list(islice(groups, 1))  # one group, or none; `groups` has the others
    if schema is None:
        [(_, _, first_pieces)] = first_groups
        schema = first_pieces[0].schema

    rows_of_groups: list[int] = []
    with pq.ParquetWriter(sink, schema) as writer:
        for num_rows, _, group_pieces in chain(first_groups, groups):
            writer.write_table(pa.Table.from_batches(group_pieces))
            rows_of_groups.append(num_rows)
    return rows_of_groups


def grouped(slices: Iterable[tuple[int, int, T]]) -> Iterator[tuple[int, int, list[T]]]:
    """Put slices together into row groups. Slices and groups are (rows, bytes, content)."""
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
    """Cut a batch into pieces with the same number of rows, at least one. A piece has about GROUP_BYTES at most."""
    batch_bytes = max(GROUP_BYTES, batch.nbytes)  # a small batch is one piece
    piece_rows = max(1, batch.num_rows * GROUP_BYTES // batch_bytes)
    return (batch.slice(start, piece_rows) for start in range(0, batch.num_rows, piece_rows))


#: The fewest rows of a bucket.
BUCKET_ROWS = 1 << 12
MAX_BUCKETS = 256
#: Rows and bytes that are collected before they are written to the buckets' files.
BATCH_ROWS = 1 << 16
BATCH_BYTES = 1 << 25
#: The most rows that are read from a bucket at once.
READ_ROWS = 1 << 14

_PLACE = pa.field("\0place", pa.int64())


class RowBuckets(ExitStack):
    """Takes rows in any order, and yields them in the order of their places. Use it in a `with` block.

    A bucket is a file of rows whose places are near each other. rows: the highest possible place, plus one.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        #: How many places a bucket has.
        self._bucket_rows = max(BUCKET_ROWS, math.ceil(rows / MAX_BUCKETS))
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        #: By bucket, the path of its file, and the stream that writes into the file.
        self._streams: dict[int, tuple[str, Any]] = {}
        self._folder = self.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-"))

    def add(self, places: npt.NDArray[np.int64], batch: pa.RecordBatch) -> None:
        """Take rows with their places."""
        schema = batch.schema.append(_PLACE)
        with_places = pa.RecordBatch.from_arrays([*batch.columns, pa.array(places)], schema=schema)
        self._waiting.append(with_places)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += int(batch.nbytes)
        if self._waiting_rows > BATCH_ROWS or self._waiting_bytes > BATCH_BYTES:
            self._flush()

    def sorted(self) -> Iterator[pa.Table]:
        """Yield all rows in the order of their places. This can be done once."""
        self._flush()
        for _, (path, stream) in sorted(self._streams.items()):
            stream.close()
            with pa.memory_map(path) as source:
                table = pa.ipc.open_stream(source).read_all()
                order_of_rows = np.argsort(table[_PLACE.name].to_numpy())
                ranks = np.argsort(order_of_rows)  # each row's number in the sorted table
                rows_in_batch_bytes = len(ranks) * BATCH_BYTES // max(1, table.nbytes)
                num_rows = min(READ_ROWS, max(1, rows_in_batch_bytes))
                # Take a few rows at a time, by their ranks, because `take` joins a column's chunks, and a joined column
                # holds at most 2 GiB of text.
                for start in range(0, len(ranks), num_rows):
                    is_next = (ranks >= start) & (ranks < start + num_rows)
                    next_rows = table if is_next.all() else table.filter(pa.array(is_next))
                    order = np.argsort(next_rows[_PLACE.name].to_numpy())
                    yield next_rows.take(order).drop_columns([_PLACE.name])
            os.remove(path)

    def _flush(self) -> None:
        """Write the waiting rows to the buckets' files."""
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        self._waiting = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        buckets = table[_PLACE.name].to_numpy() // self._bucket_rows  # for each row, its bucket
        for bucket in map(int, np.unique(buckets)):
            if bucket not in self._streams:
                path = os.path.join(self._folder, str(bucket))
                stream = self.enter_context(pa.ipc.new_stream(path, table.schema))
                self._streams[bucket] = (path, stream)
            _, stream = self._streams[bucket]
            is_in_bucket = pa.array(buckets == bucket)
            stream.write_table(table.filter(is_in_bucket))
