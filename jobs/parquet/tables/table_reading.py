"""Files of strangers as children read them: the worker gives them the bytes, and gets Arrow's.

Of an input file a reader gives the rows in order, a shard's worth at a time.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from jobs import errors
from jobs.context import never_interrupted
from jobs.context.shared_files import CHILDREN
from jobs.errors import CorruptParquet, ShardTooLarge, TableNotRead
from jobs.parquet.files.storage import Storage, reading
from jobs.parquet.tables.columns import ALL_COLUMNS, AS_JSON, PROBLEM, ColumnChoice, holds, is_bytes
from jobs.runs.plans.plan import Shard
from sandbox import ChildDied, ChildFailed, ChildOutOfMemory, Limits

#: Seconds in which a child has to reply with a batch, or ask for bytes.
LIMIT_S = 30.0
#: Of TOKENMILL_MAX_SHARD_BYTES a child may take; of what is no Parquet, as a record batch of Arrow's comes whole; of
#: files of pictures, whose pages are large; and it may at least.
CHILD_SHARE, FORMAT_SHARE, BYTES_SHARE, MIN_BYTES = 3 / 8, 3 / 4, 6, 64 << 20
#: Rows of a batch: at first, and where so many have taken too much memory.
BATCH_ROWS = (4096, 32, 1)

_LOOK, _READ = "jobs.parquet.tables.table_child:look", "jobs.parquet.tables.table_child:read"
T = TypeVar("T")
#: Has a child do a task with an open file; yields what it replies. Raises what is wrong with the file, and ChildFailed.
Ask = Callable[[str, Mapping[str, Any]], Iterator[tuple[dict[str, Any], bytearray]]]


@dataclass(frozen=True)
class Contents:
    """What a look at a file tells: rows and bytes of each of its row groups, as they are or will be.

    statistics: what a part says of itself. kinds: of a text file's columns.
    """

    schema: pa.Schema
    groups: list[tuple[int, int]]
    rows: int = 0
    statistics: str = ""
    kinds: Mapping[str, Any] = field(default_factory=dict)


def look_at(
    storage: Storage, path: str, input_format: str | None = None, task: str = _LOOK, **question: Any
) -> Contents:
    """Return what a file holds, as a task tells. Raises CorruptParquet or CorruptTable, TableNotRead, InputNotFound."""

    def look() -> Contents:
        with open_table(storage, path, input_format) as ask:
            ((found, schema),) = ask(task, question)
        return Contents(read_schema(schema), **found)

    return asked_again(path, look)


def asked_again(path: str, ask: Callable[[], T]) -> T:
    """Return what is asked of a child, of another one where the first one was killed. Raises TableNotRead."""
    try:
        try:
            return ask()
        except ChildDied:
            return ask()
    except ChildFailed as error:
        raise TableNotRead(path, str(error)) from None


def read_schema(schema: bytes | bytearray) -> pa.Schema:
    """Return the columns of a file that holds something of its own."""
    found = pa.ipc.read_schema(pa.py_buffer(schema))
    fields = [field for field in found if field.name != PROBLEM and not field.name.startswith(AS_JSON)]
    return pa.schema(fields, metadata=found.metadata)


class TableReading:
    """One pass over a file from a group of its rows to the end. Raises as look_at.

    schema: of the whole file. batches: its rows, once. columns: a name that is not there is passed over. A child that
    was killed is replaced once, and one that takes too much memory is asked for fewer rows at a time.
    """

    def __init__(self, storage: Storage, path: str, columns: ColumnChoice = ALL_COLUMNS, first_group: int = 0) -> None:
        self.batches = _read(storage, path, columns, first_group)
        self.schema: pa.Schema = next(self.batches)

    def close(self) -> None:
        self.batches.close()


def _read(storage: Storage, path: str, columns: ColumnChoice, first_group: int) -> Generator[Any, None, None]:
    schema, rows_done, sizes, was_replaced, share = None, 0, list(BATCH_ROWS), False, CHILD_SHARE
    while True:
        question = {"columns": columns, "first_group": first_group, "skip": rows_done, "rows": sizes[0]}
        try:
            with open_table(storage, path, share=share) as ask:
                replies = ask(_READ, question)
                _, packed = next(replies)
                if schema is None:
                    schema = read_schema(packed)
                    yield schema
                for _, body in replies:
                    batch = pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
                    rows_done += batch.num_rows
                    yield batch
                return
        except ChildFailed as error:
            if isinstance(error, ChildDied) and not was_replaced:
                was_replaced = True
            elif isinstance(error, ChildOutOfMemory) and share < BYTES_SHARE and _has_bytes(schema, columns):
                share = BYTES_SHARE
            elif isinstance(error, ChildOutOfMemory) and len(sizes) > 1:
                del sizes[0]
            else:
                raise TableNotRead(path, str(error)) from None


def _has_bytes(schema: pa.Schema | None, columns: ColumnChoice) -> bool:
    if schema is None:
        return False
    names = columns.of(schema.names) or schema.names
    return any(holds(schema.field(name).type, is_bytes) for name in names if name != PROBLEM)


@contextmanager
def open_table(
    storage: Storage, path: str, input_format: str | None = None, share: float | None = None
) -> Iterator[Ask]:
    """Open a file, and lend a child, of a share of a shard's bytes, that is given the file's."""
    share = share or (FORMAT_SHARE if input_format else CHILD_SHARE)
    limits = Limits(LIMIT_S, max(MIN_BYTES, int(storage.shard_bytes * share)))
    stack = ExitStack()

    def fetch(wanted: Mapping[str, Any]) -> bytes:
        storage.check_interrupted()
        with reading(path, input_format):
            found: bytes = source.read_at(wanted["size"], wanted["at"])
        return found

    def ask(task: str, question: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bytearray]]:
        own = {"path": path, "input_format": input_format, "size": size}
        replies = child.replies(task, {**own, **question}, limits, fetch=fetch)
        stack.callback(replies.close)
        for message, body in replies:
            if "error" in message:
                replies.close()
                raise getattr(errors, message["error"])(*message["args"])
            yield message, body

    try:
        with reading(path, input_format):
            source = stack.enter_context(storage.open_input(path))
            size = source.size()
        child = stack.enter_context(CHILDREN.lent())
        yield ask
    finally:
        stack.close()  # whatever was raised: a child whose task is stopped serves the next one


#: Times its limit that the rows of a shard may stand for in all, batch after batch: each costs time and disk.
SHARD_TIMES = 16


class RowReader(TableReading):
    """One pass over a file, from the row group of some shard to the end: Parquet cannot be entered in its middle.

    So one that goes on where the last shard ended decodes each row once.
    """

    def __init__(self, storage: Storage, path: str, first: Shard, columns: ColumnChoice = ALL_COLUMNS) -> None:
        super().__init__(storage, path, columns, first.first_group)
        self._path, self._limit = path, SHARD_TIMES * storage.shard_bytes
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
                if shard_bytes > self._limit:
                    widest = max(batch.schema.names, key=lambda name: batch.column(name).nbytes)
                    what = f"its rows stand for {shard_bytes} bytes and more, most of column {widest!r}"
                    remedy = "submit with a smaller rows_per_shard"
                    raise ShardTooLarge(self._path, what, self._limit, f"{SHARD_TIMES} times ", remedy)
                yield batch
