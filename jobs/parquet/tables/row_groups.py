"""Rows put together: into row groups of a size, as a footer of many takes longer to read than its rows, or sorted.

They are sorted on this machine's disk, some neighbours at a time in memory.
"""

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
#: Rows and bytes after which a row group ends; so many bytes have the batches that a worker gets, too.
GROUP_ROWS, GROUP_BYTES = 1 << 16, 1 << 23


def write_groups(sink: Any, schema: pa.Schema | None, batches: Iterable[pa.RecordBatch]) -> list[int]:
    """Write rows as Parquet; return how many each row group has. schema: is needed where there may be no row."""
    cut = ((piece.num_rows, piece.nbytes, piece) for batch in batches for piece in pieces(batch))
    tables, groups = (pa.Table.from_batches(each) for _, _, each in grouped(cut)), list[int]()
    first = list(islice(tables, 1))
    with pq.ParquetWriter(sink, schema or first[0].schema) as writer:
        for table in chain(first, tables):
            writer.write_table(table)
            groups.append(table.num_rows)
    return groups


def grouped(slices: Iterable[tuple[int, int, T]]) -> Iterator[tuple[int, int, list[T]]]:
    """Put slices, each behind its rows and bytes, together to row groups; yield these likewise."""
    rows, size, taken = 0, 0, list[T]()
    for own_rows, own_size, each in slices:
        taken.append(each)
        rows, size = rows + own_rows, size + own_size
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield rows, size, taken
            rows, size, taken = 0, 0, []
    if taken:
        yield rows, size, taken


def packed(batch: pa.RecordBatch) -> memoryview:
    """Return a batch in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of GROUP_BYTES, where they have more than one row."""
    rows = max(1, batch.num_rows * GROUP_BYTES // max(GROUP_BYTES, batch.nbytes))
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


BUCKET_ROWS, MAX_BUCKETS = 1 << 12, 256
#: Rows and bytes that are handed to the files at once, and rows that are read at once.
BATCH_ROWS, BATCH_BYTES, READ_ROWS = 1 << 16, 1 << 25, 1 << 14

_PLACE = pa.field("\0place", pa.int64())


class RowBuckets(ExitStack):
    """Takes rows in any order, and yields them by their places. Used in a `with` block."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._size = max(BUCKET_ROWS, -(-rows // MAX_BUCKETS))
        self._waiting, self._rows, self._bytes = list[pa.RecordBatch](), 0, 0
        self._streams: dict[int, tuple[str, Any]] = {}
        self._folder = self.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-"))

    def add(self, places: npt.NDArray[np.int64], batch: pa.RecordBatch) -> None:
        schema = batch.schema.append(_PLACE)
        self._waiting.append(pa.RecordBatch.from_arrays([*batch.columns, pa.array(places)], schema=schema))
        self._rows, self._bytes = self._rows + batch.num_rows, self._bytes + int(batch.nbytes)
        if self._rows > BATCH_ROWS or self._bytes > BATCH_BYTES:
            self._flush()

    def sorted(self) -> Iterator[pa.Table]:
        self._flush()
        for _, (path, stream) in sorted(self._streams.items()):
            stream.close()
            with pa.memory_map(path) as source:
                table = pa.ipc.open_stream(source).read_all()
                ranks = np.argsort(np.argsort(table[_PLACE.name].to_numpy()))
                rows = min(READ_ROWS, max(1, len(ranks) * BATCH_BYTES // max(1, table.nbytes)))
                for start in range(0, len(ranks), rows):
                    # Few at a time: a column is put together before it is put in order, and holds 2 GiB of text then.
                    is_next = (ranks >= start) & (ranks < start + rows)
                    some = table if is_next.all() else table.filter(pa.array(is_next))
                    yield some.take(np.argsort(some[_PLACE.name].to_numpy())).drop_columns([_PLACE.name])
            os.remove(path)

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        self._waiting, self._rows, self._bytes = [], 0, 0
        buckets = table[_PLACE.name].to_numpy() // self._size
        for bucket in map(int, np.unique(buckets)):
            if bucket not in self._streams:
                path = os.path.join(self._folder, str(bucket))
                self._streams[bucket] = path, self.enter_context(pa.ipc.new_stream(path, table.schema))
            self._streams[bucket][1].write_table(table.filter(pa.array(buckets == bucket)))
