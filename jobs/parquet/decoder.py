"""Decoder: a Parquet file's rows in batches that stay small whatever its pages stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.parquet.inputs import parquet_file
from jobs.parquet.page_meter import PageMeter
from jobs.parquet.pages import Leaf, leaves
from jobs.parquet.read_room import ReadRoom
from jobs.parquet.row_bounds import Bounds, Stretch


class Decoder:
    """Decodes an open file once, from a row group to its end.

    source, file: the same file, as it is and as pyarrow's ParquetFile; the caller closes both. columns: those
    that are decoded. used: those that are sized up. None of either means all. room: where each
    stretch is reserved before it is read; its limit is that of Bounds.
    """

    #: What the batch that came last was read with.
    stretch: Stretch

    def __init__(
        self,
        path: str,
        source: Any,
        file: pq.ParquetFile,
        footer: pq.FileMetaData,
        columns: Sequence[str] | None,
        used: Sequence[str] | None,
        room: ReadRoom,
    ) -> None:
        self._path, self._source, self._file = path, source, file
        self._columns, self._used, self._room = columns, used, room
        self.footer: pq.FileMetaData = footer
        self.schema: pa.Schema = file.schema_arrow

    @property
    def row_bytes(self) -> float:
        return self.stretch.row_bytes

    @property
    def widest(self) -> str:
        return self.stretch.widest

    def batch_bytes(self, batch: pa.RecordBatch) -> int:
        """Return what a batch takes: its buffers are its own."""
        return int(batch.get_total_buffer_size())

    def batches(self, first_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Raises ShardTooLarge, NoRoomYet, CorruptParquet, and whatever pyarrow raises."""
        columns = [leaf for leaf in leaves(self._file.schema) if _is_of(leaf, self._used)]
        bounds = Bounds(self._path, self._source, self.footer, columns, self._wants, self._room.limit)
        for self.stretch in bounds.stretches(first_group):
            self._room.reserve(self.stretch.held)
            if self.stretch.nested:
                yield from self._metered(self.stretch)
            else:
                yield from self._read(self._file, self.stretch)

    def _wants(self, leaf: Leaf) -> bool:
        return _is_of(leaf, self._columns)

    def _read(self, file: pq.ParquetFile, stretch: Stretch) -> Iterator[pa.RecordBatch]:
        batches: Iterator[pa.RecordBatch] = file.iter_batches(
            stretch.rows, row_groups=stretch.groups, columns=self._columns, use_threads=False
        )
        return batches

    def _metered(self, stretch: Stretch) -> Iterator[pa.RecordBatch]:
        meter = PageMeter(
            self._path,
            self._source,
            self._room.limit,
            stretch.nested,
            lambda begun: self._room.reserve(stretch.held + begun),
        )
        with pa.PythonFile(meter, "r") as source, parquet_file(self._path, source, self.footer) as file:
            batches = self._read(file, stretch)
            while (batch := next(batches, None)) is not None:
                yield batch
                meter.begin_batch()


def _is_of(leaf: Leaf, names: Sequence[str] | None) -> bool:
    """Whether one of the columns, None for all, holds the leaf."""
    return names is None or any(leaf.path == name or leaf.path.startswith(f"{name}.") for name in names)
