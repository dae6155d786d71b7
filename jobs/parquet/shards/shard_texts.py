"""Renders the rows of a shard, and counts the bytes that their texts take in memory."""

import os
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, closing

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.shared_files import ShardBytes
from jobs.errors import ShardTooLarge
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts.picture_source import picture_reader
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.parquet.tables.columns import ALL_COLUMNS, ColumnChoice, RowProblem, with_added_values
from jobs.parquet.tables.table_reading import RowReader
from jobs.runs.plans.plan import Plan, Shard

#: The bytes of a row without its texts: its object and its entries in lists, or the reason why it has no texts.
ROW_BYTES = 300


class ShardTexts:
    """Gathers a shard's rendered rows. shard_bytes: counts their bytes until `let_go` or `close`.

    path, columns, remedy: for the error of a shard that is too large.
    """

    def __init__(
        self,
        path: str,
        columns: tuple[str, ...],
        shard_bytes: ShardBytes,
        remedy: str = "submit with a smaller rows_per_shard",
    ) -> None:
        self._path = path
        self._columns = columns
        self._shard_bytes = shard_bytes
        self._remedy = remedy
        #: For each row, the first row that equals it.
        self._first_of_equal: dict[Row, Row] = {}
        #: The bytes that are counted in `shard_bytes`.
        self._bytes = 0
        self.rows: list[Row | RowProblem] = []

    def add(self, rows: Iterable[Row | RowProblem]) -> None:
        """Take more rows. Raises ShardTooLarge, or NoRoomYet if other shards hold the memory that the rows need."""
        for row in rows:
            num_bytes = ROW_BYTES
            if isinstance(row, Row):
                first_equal_row = self._first_of_equal.setdefault(row, row)
                if first_equal_row is row:
                    num_bytes += row.num_bytes
                row = first_equal_row  # equal rows share their texts
            self.rows.append(row)
            if self._bytes + num_bytes > self._shard_bytes.limit:
                raise self._too_large(self._bytes + num_bytes)
            self._shard_bytes.hold(num_bytes, already_held=self._bytes)
            self._bytes += num_bytes

    def _too_large(self, num_bytes: int) -> ShardTooLarge:
        """Return the error for rows that take more bytes than a shard may."""
        columns = ", ".join(map(repr, self._columns))
        problem = (
            f"the prompts of column {columns} in the first {len(self.rows)} rows of a shard "
            f"take {num_bytes} bytes"
        )
        # The limit of these texts equals this setting, and the limit of a RowReader is a multiple of it.
        setting = "TOKENMILL_MAX_SHARD_BYTES"
        return ShardTooLarge(self._path, problem, self._shard_bytes.limit, setting, self._remedy)

    def take_rows(self) -> list[Row | RowProblem]:
        """Return the rows, once all rows are added. This object then holds no rows any more."""
        rows = self.rows
        self.rows = []
        self._first_of_equal = {}
        return rows

    def let_go(self, row: Row) -> None:
        """Stop counting the bytes of a row whose texts nobody needs any more."""
        self._release(row.num_bytes)

    def close(self) -> None:
        """Stop counting the rows' bytes. May be called more than once."""
        self._release(self._bytes)

    def _release(self, num_bytes: int) -> None:
        """Subtract a number of bytes from the counted bytes, but not more than are counted."""
        num_bytes = min(num_bytes, self._bytes)
        self._bytes -= num_bytes
        self._shard_bytes.let_go(num_bytes)


def shard_batches(
    context: JobContext, plan: Plan, shard: Shard, reader: RowReader
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a shard with the added columns. For a text file, the column PROBLEM has the rows' problems."""
    for batch in reader.read(shard, context.check_interrupted):
        yield with_added_values(batch, plan.added_columns, plan.files[shard.file].values)


def shard_rows(
    context: JobContext, plan: Plan, shard: Shard, reader: RowReader, source: RowSource
) -> Iterator[Row | RowProblem]:
    """Yield the rendered rows of a shard. Paths of pictures are relative to the folder of the shard's input file."""
    file = plan.files[shard.file]
    folders = {os.path.dirname(input_file.path) for input_file in plan.files}
    folder: str | None = os.path.dirname(file.path)
    if file.num_chosen and len(folders) > 1:
        folder = None  # the chosen rows of all folders are in one file, which does not say a row's folder
    read = picture_reader(context, folder)
    for batch in shard_batches(context, plan, shard, reader):
        for row in source.rows(batch, read):
            context.check_interrupted()
            yield row


def rendered_shards(
    context: JobContext,
    storage: Storage,
    plan: Plan,
    source: RowSource,
    only: Set[int] | None = None,
) -> Iterator[tuple[int, list[Row | RowProblem]]]:
    """Yield the number of each shard's first row, and the shard's rows. Raises InputError.

    only: row numbers. Shards that hold none of these rows are left out. None for all shards.
    """
    shards = range(len(plan.shards)) if only is None else plan.shards_of(only)
    columns = ColumnChoice(source.columns)
    for shard_number, reader in shard_readers(storage, plan, shards, columns):
        shard = plan.shards[shard_number]
        path = plan.files[shard.file].path
        # The rows of each shard are counted alone, because they are gone when the next shard is read.
        shard_bytes = ShardBytes(context.shard_bytes.limit)
        texts = ShardTexts(path, source.columns, shard_bytes)
        texts.add(shard_rows(context, plan, shard, reader, source))
        yield plan.first_row(shard_number), texts.take_rows()


def shard_readers(
    storage: Storage, plan: Plan, shards: Iterable[int], columns: ColumnChoice = ALL_COLUMNS
) -> Iterator[tuple[int, RowReader]]:
    """Yield the number of each shard that has rows, and a reader that reaches these rows.

    A reader only moves forwards. If the previous shard's reader can still reach a shard, that reader is used again.
    """
    reader = None
    file_number = -1
    with ExitStack() as open_readers:
        for shard_number in shards:
            shard = plan.shards[shard_number]
            if not shard.rows:
                continue
            if reader is None or shard.file != file_number or not reader.reaches(shard):
                open_readers.close()
                file_number = shard.file
                path = plan.rows_path(plan.files[file_number])
                reader = RowReader(storage, path, shard, columns)
                open_readers.enter_context(closing(reader))
            yield shard_number, reader
