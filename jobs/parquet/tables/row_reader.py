"""The rows of an input file in order, a shard's worth at a time."""

from collections.abc import Callable, Iterator

import pyarrow as pa

from jobs.context import never_interrupted
from jobs.context.shared_files import DEFAULT_BYTES
from jobs.errors import CorruptParquet, ShardTooLarge
from jobs.parquet.files.storage import Storage
from jobs.parquet.tables.columns import ALL_COLUMNS, ColumnChoice
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.plan import Shard

#: Times its limit that the rows of a shard may stand for in all, batch after batch: each costs time and disk.
SHARD_TIMES = 16


class RowReader(TableReading):
    """One pass over a file, from the row group of some shard to the end: Parquet cannot be entered in its middle.

    So one that goes on where the last shard ended decodes each row once. limit: the bytes of one shard's prompts.
    """

    def __init__(
        self, storage: Storage, path: str, first: Shard, columns: ColumnChoice = ALL_COLUMNS, limit: int = DEFAULT_BYTES
    ) -> None:
        super().__init__(storage, path, columns, first.first_group, limit)
        self._path, self._limit = path, limit
        self._left: pa.RecordBatch | None = None
        #: The row that comes next, counted within the file.
        self.next_row = first.start - first.skip

    def reaches(self, shard: Shard) -> bool:
        """Whether the shard lies ahead, and no new reader would start nearer to it."""
        return shard.start - shard.skip <= self.next_row <= shard.start

    def read(self, shard: Shard, check_interrupted: Callable[[], None] = never_interrupted) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard that lies ahead, of a text file with their problems. Raises ShardTooLarge."""
        end, shard_bytes = shard.start + shard.rows, 0
        while self.next_row < end:
            check_interrupted()
            batch = next(self.batches, None) if self._left is None else self._left
            if batch is None:
                raise CorruptParquet(self._path, f"{end - self.next_row} rows fewer than its footer says")
            taken = min(batch.num_rows, end - self.next_row)
            ahead = min(taken, max(0, shard.start - self.next_row))
            self._left = batch.slice(taken) if taken < batch.num_rows else None
            self.next_row += taken
            if taken > ahead:
                batch = batch.slice(ahead, taken - ahead)
                shard_bytes += batch.nbytes
                if shard_bytes > (limit := SHARD_TIMES * self._limit):
                    widest = max(batch.schema.names, key=lambda name: batch.column(name).nbytes)
                    what = f"its rows stand for {shard_bytes} bytes and more, most of column {widest!r}"
                    remedy = "submit with a smaller rows_per_shard"
                    raise ShardTooLarge(self._path, what, limit, f"{SHARD_TIMES} times ", remedy)
                yield batch
