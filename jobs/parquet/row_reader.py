"""The rows of an input file in order, a shard's worth at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from jobs.context import never_interrupted
from jobs.context.shard_bytes import ShardBytes
from jobs.errors import CorruptParquet, CorruptTable, InputError, ShardTooLarge
from jobs.parquet.column_choice import ALL_COLUMNS, ColumnChoice
from jobs.parquet.decoders import Table, opened_decoder
from jobs.parquet.read_room import ReadRoom
from jobs.parquet.row_bounds import SHARD_TIMES
from jobs.parquet.storage import Storage, reading
from jobs.runs.plans.formats import PARQUET
from jobs.runs.plans.plan import Shard

PARQUET_TABLE = Table()


class RowReader:
    """One pass over a file, from the row group of some shard to the end.
    Raises CorruptParquet, CorruptTable or FooterTooLarge.

    Parquet cannot be entered in the middle of a row group, and a footer lists every row group of the file: a
    reader per shard would decode a group of a million rows for each thousand of them. One that goes on where
    the last shard ended decodes each row once.

    columns: that are read. used: those that the run reads at all, which are sized up here too. footer: the
    file's, where another reader has parsed it. table: how it is read. room: where what is read is reserved;
    reading raises ShardTooLarge beyond its limit, NoRoomYet beside other readers. One thread: the others
    belong to the engine.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        first: Shard,
        columns: ColumnChoice = ALL_COLUMNS,
        footer: Any = None,
        room: ReadRoom | None = None,
        used: ColumnChoice = ALL_COLUMNS,
        table: Table = PARQUET_TABLE,
    ) -> None:
        self._path, self._room, self._format = path, room or ReadRoom(ShardBytes()), table.input_format
        self._limit = self._room.limit
        self._resources = ExitStack()
        self._resources.callback(self._room.close)
        opened = opened_decoder(storage, path, table, columns, used, footer, self._room)
        self._decoder = self._resources.enter_context(opened)
        #: The schema of the whole file.
        self.schema: pa.Schema = self._decoder.schema
        self.footer = self._decoder.footer
        self._batches = self._decoder.batches(first.first_group)
        self._left: pa.RecordBatch | None = None
        self._batch_rows, self._batch_bytes = 1, 0  # of the batch that was decoded last
        #: The row that comes next, counted within the file.
        self.next_row = first.start - first.skip

    def reaches(self, shard: Shard) -> bool:
        """Whether the shard lies ahead, and no new reader would start nearer to it."""
        return shard.start - shard.skip <= self.next_row <= shard.start

    def read(
        self, shard: Shard, check_interrupted: Callable[[], None] = never_interrupted
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard that lies ahead; of a text file with their problems (formats.problems).

        check_interrupted: called before rows are decoded. Raises ShardTooLarge.
        """
        end, shard_bytes = shard.start + shard.rows, 0.0
        while self.next_row < end:
            check_interrupted()
            batch = self._next_batch(end - self.next_row)
            taken = min(batch.num_rows, end - self.next_row)
            ahead = min(taken, max(0, shard.start - self.next_row))
            self._left = batch.slice(taken) if taken < batch.num_rows else None
            self.next_row += taken
            if taken > ahead:
                row_bytes = max(self._decoder.row_bytes, self._batch_bytes / self._batch_rows)
                shard_bytes += (taken - ahead) * row_bytes
                self._check(batch, shard_bytes)
                yield batch.slice(ahead, taken - ahead)

    def _check(self, batch: pa.RecordBatch, shard_bytes: float) -> None:
        """Raise ShardTooLarge for a batch whose values turn out too large, or where the shard's may."""
        if shard_bytes > (limit := SHARD_TIMES * self._limit):
            widest = self._decoder.widest or _widest(batch)
            what = f"its rows stand for {int(shard_bytes)} bytes and more, most of column {widest!r}"
            remedy = "submit with a smaller rows_per_shard"
            raise ShardTooLarge(self._path, what, limit, f"{SHARD_TIMES} times ", remedy)
        if self._batch_bytes > (limit := self._limit // 2):
            widest = _widest(batch)
            what = (
                f"{self._batch_rows} of its rows take {self._batch_bytes} bytes, most of them of column "
                f"{widest!r}"
            )
            raise ShardTooLarge(
                self._path, what, limit, "half of ", "shorten these values, or leave them out"
            )

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._left = None
        self._resources.close()

    def _next_batch(self, missing: int) -> pa.RecordBatch:
        if self._left is not None:
            return self._left
        with reading(self._path, None if self._format == PARQUET else self._format):
            batch = next(self._batches, None)
        if batch is None:
            raise self._too_few(missing)
        self._batch_rows, self._batch_bytes = max(batch.num_rows, 1), self._decoder.batch_bytes(batch)
        return batch

    def _too_few(self, missing: int) -> InputError:
        if self._format == PARQUET:
            return CorruptParquet(self._path, f"{missing} rows fewer than its footer says")
        return CorruptTable(self._path, self._format, f"{missing} rows fewer than were planned")


def _widest(batch: pa.RecordBatch) -> str:
    return str(max(batch.schema.names, key=lambda name: batch.column(name).get_total_buffer_size()))
