"""The rows of an input file in order, a shard's worth at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq

from ..context import never_interrupted
from ..errors import CorruptParquet
from .inputs import open_parquet
from .plan import Shard
from .storage import Storage, reading

#: Rows decoded at once: enough to amortise a call, few enough that long texts stay small in memory.
BATCH_ROWS = 1024


class RowReader:
    """One pass over a file, from the row group of some shard to the end. Raises CorruptParquet.

    Parquet cannot be entered in the middle of a row group, and a footer lists every row group of the file: a
    reader per shard would decode a group of a million rows for each thousand of them. One that goes on where
    the last shard ended decodes each row once.

    columns: None for all. footer: the file's, where another reader has parsed it. One thread: the others
    belong to the engine.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        first: Shard,
        columns: Sequence[str] | None = None,
        footer: pq.FileMetaData | None = None,
    ) -> None:
        self._path = path
        self._resources = ExitStack()
        file = self._resources.enter_context(open_parquet(storage, path, footer))
        #: The schema of the whole file.
        self.schema: pa.Schema = file.schema_arrow
        self.footer: pq.FileMetaData = file.metadata if footer is None else footer
        groups = range(first.first_group, self.footer.num_row_groups)
        self._batches = file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False)
        self._left: pa.RecordBatch | None = None
        #: The row that comes next, counted within the file.
        self.next_row = first.start - first.skip

    def reaches(self, shard: Shard) -> bool:
        """Whether the shard lies ahead, and no new reader would start nearer to it."""
        return shard.start - shard.skip <= self.next_row <= shard.start

    def read(
        self, shard: Shard, check_interrupted: Callable[[], None] = never_interrupted
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard that lies ahead. check_interrupted: called before rows are decoded."""
        end = shard.start + shard.rows
        while self.next_row < end:
            check_interrupted()
            batch = self._next_batch(end - self.next_row)
            taken = min(batch.num_rows, end - self.next_row)
            ahead = min(taken, max(0, shard.start - self.next_row))
            self._left = batch.slice(taken) if taken < batch.num_rows else None
            self.next_row += taken
            if taken > ahead:
                yield batch.slice(ahead, taken - ahead)

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._left = None
        self._resources.close()

    def _next_batch(self, missing: int) -> pa.RecordBatch:
        if self._left is not None:
            return self._left
        with reading(self._path):
            batch = next(self._batches, None)
        if batch is None:
            raise CorruptParquet(self._path, f"{missing} rows fewer than its footer says")
        return batch
