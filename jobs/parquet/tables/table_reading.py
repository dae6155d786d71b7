"""Reads files that are not trusted, in child processes. A child gets bytes from the worker, and returns Arrow batches.

A RowReader gives the rows of an input file in order, shard by shard.
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

#: The seconds in which a child has to reply with a batch, or ask for bytes.
LIMIT_S = 30.0

# The following limits of a child's memory are shares of TOKENMILL_MAX_SHARD_BYTES.
#: A child that reads Parquet.
CHILD_SHARE = 3 / 8
#: A child that reads another format. It must hold a whole record batch of Arrow's.
FORMAT_SHARE = 3 / 4
#: A child that reads columns of bytes, such as pictures, whose pages are large.
BYTES_SHARE = 6
#: Every child may take at least this many bytes.
MIN_BYTES = 64 << 20

#: The most rows of a batch. Each time that a child takes too much memory, the next number is tried.
BATCH_ROWS = (4096, 32, 1)

_LOOK = "jobs.parquet.tables.table_child:look"
_READ = "jobs.parquet.tables.table_child:read"
T = TypeVar("T")
#: Has a child do a task with an open file, and yields the child's replies. Raises the file's error, or ChildFailed.
Ask = Callable[[str, Mapping[str, Any]], Iterator[tuple[dict[str, Any], bytearray]]]


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    groups: the rows and bytes of each of its row groups. A file in another format gets the row groups of the Parquet
    file into which it will be converted.
    rows: how many rows the footer of a Parquet file states.
    statistics: a part's statistics as JSON; "" for other files.
    kinds: the types of a text file's columns, see formats/kinds.py.
    """

    schema: pa.Schema
    groups: list[tuple[int, int]]
    rows: int = 0
    statistics: str = ""
    kinds: Mapping[str, Any] = field(default_factory=dict)


def look_at(
    storage: Storage, path: str, input_format: str | None = None, task: str = _LOOK, **question: Any
) -> Contents:
    """Return what a file holds. Raises CorruptParquet or CorruptTable, TableNotRead, InputNotFound.

    task: the dotted name of the child's function that replies with the contents. question: what the task needs.
    """

    def look() -> Contents:
        """Have a child look at the file once."""
        with open_table(storage, path, input_format) as ask:
            [(contents, packed_schema)] = ask(task, question)
        return Contents(read_schema(packed_schema), **contents)

    return with_second_try(path, look)


def with_second_try(path: str, ask: Callable[[], T]) -> T:
    """Return the result of `ask`, which uses a child process. If the child is killed, `ask` is called once more.

    Raises TableNotRead if a child fails otherwise, or is killed twice.
    """
    try:
        try:
            return ask()
        except ChildDied:
            return ask()
    except ChildFailed as error:
        raise TableNotRead(path, str(error)) from None


def read_schema(packed_schema: bytes | bytearray) -> pa.Schema:
    """Return a file's schema without the columns that only Tokenmill uses."""
    schema = pa.ipc.read_schema(pa.py_buffer(packed_schema))
    fields = []
    for column in schema:
        is_ours = column.name == PROBLEM or column.name.startswith(AS_JSON)
        if not is_ours:
            fields.append(column)
    return pa.schema(fields, metadata=schema.metadata)


class TableReading:
    """Reads a file once, from a row group to the end. Raises the errors of look_at.

    schema: the schema of the whole file. batches: an iterator over its rows, with the chosen columns.
    A child that was killed is replaced once. A child that takes too much memory is asked for fewer rows at a time.
    """

    def __init__(
        self, storage: Storage, path: str, columns: ColumnChoice = ALL_COLUMNS, first_group: int = 0
    ) -> None:
        self.batches = _read(storage, path, columns, first_group)
        self.schema: pa.Schema = next(self.batches)  # the schema comes before the batches

    def close(self) -> None:
        """Stop reading, so that the child process can serve another reader."""
        self.batches.close()


def _read(
    storage: Storage, path: str, columns: ColumnChoice, first_group: int
) -> Generator[Any, None, None]:
    """Yield a file's schema, then its batches. If a child fails, a new child goes on; see TableReading."""
    schema = None
    rows_done = 0
    batch_rows = list(BATCH_ROWS)  # the first number is used, and is removed for the next try
    was_replaced = False
    share: float = CHILD_SHARE  # how much memory the child may take, see open_table
    while True:  # for each child, until a child comes to the file's end
        question = {
            "columns": columns,
            "first_group": first_group,
            "skip": rows_done,
            "rows": batch_rows[0],
        }
        try:
            with open_table(storage, path, share=share) as ask:
                replies = ask(_READ, question)
                _, packed_schema = next(replies)
                if schema is None:
                    schema = read_schema(packed_schema)
                    yield schema
                for _, body in replies:
                    batch = pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
                    rows_done += batch.num_rows
                    yield batch
                return
        except ChildFailed as error:
            # Each remedy is tried a limited number of times.
            is_out_of_memory = isinstance(error, ChildOutOfMemory)
            may_take_more = share < BYTES_SHARE and _has_bytes(schema, columns)
            if isinstance(error, ChildDied) and not was_replaced:
                was_replaced = True
            elif is_out_of_memory and may_take_more:
                share = BYTES_SHARE
            elif is_out_of_memory and len(batch_rows) > 1:
                del batch_rows[0]
            else:
                raise TableNotRead(path, str(error)) from None


def _has_bytes(schema: pa.Schema | None, columns: ColumnChoice) -> bool:
    """Whether a chosen column holds bytes."""
    if schema is None:
        return False
    names = columns.chosen_from(schema.names)
    if not names:  # None if all columns are chosen
        names = schema.names
    return any(holds(schema.field(name).type, is_bytes) for name in names if name != PROBLEM)


@contextmanager
def open_table(
    storage: Storage, path: str, input_format: str | None = None, share: float | None = None
) -> Iterator[Ask]:
    """Open a file for a child process; yield a function that has the child do a task with the file.

    share: the memory that the child may take, as a multiple of `storage.shard_bytes`; by default the format's share.
    """
    if share is None:
        share = FORMAT_SHARE if input_format else CHILD_SHARE
    max_bytes = max(MIN_BYTES, int(storage.shard_bytes * share))
    limits = Limits(LIMIT_S, max_bytes)
    stack = ExitStack()

    # The next two functions use `source`, `size` and `child`, which are set below.
    def fetch(wanted: Mapping[str, Any]) -> bytes:
        """Read the bytes that the child asks for."""
        storage.check_interrupted()
        with reading(path, input_format):
            content: bytes = source.read_at(wanted["size"], wanted["at"])
        return content

    def ask(task: str, question: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bytearray]]:
        """Have the child do a task, and yield its replies. If a reply is an error, the error is raised."""
        about_file = {"path": path, "input_format": input_format, "size": size}
        replies = child.replies(task, {**about_file, **question}, limits, fetch=fetch)
        stack.callback(replies.close)
        for message, body in replies:
            if "error" in message:
                replies.close()
                error_class = getattr(errors, message["error"])
                raise error_class(*message["args"])
            yield message, body

    try:
        with reading(path, input_format):
            source = stack.enter_context(storage.open_input(path))
            size = source.size()
        child = stack.enter_context(CHILDREN.lent())
        yield ask
    finally:
        stack.close()  # stop the child's task after any error, so that the child can serve the next task


#: The decoded rows of a shard may have this many times TOKENMILL_MAX_SHARD_BYTES, because few of the rows are in memory
#: at a time.
SHARD_TIMES = 16


class RowReader(TableReading):
    """Reads a file once, from the first row group of a shard to the end.

    Reading cannot begin in the middle of a Parquet row group. So a reader is kept for the shards that follow. It goes
    on where the last shard ended, so that each row is decoded once.
    """

    def __init__(
        self, storage: Storage, path: str, first: Shard, columns: ColumnChoice = ALL_COLUMNS
    ) -> None:
        super().__init__(storage, path, columns, first.first_group)
        self._path = path
        self._limit = SHARD_TIMES * storage.shard_bytes
        self._unread: pa.RecordBatch | None = None
        #: The row that comes next, counted within the file. The first batch begins a row group, so it may have rows
        #: before the shard `first`.
        self.next_row = first.start - first.skip

    def reaches(self, shard: Shard) -> bool:
        """Whether this reader can still read the shard, and reaches it no later than a new reader would."""
        start_of_new_reader = shard.start - shard.skip
        return start_of_new_reader <= self.next_row <= shard.start

    def read(
        self, shard: Shard, check_interrupted: Callable[[], None] = never_interrupted
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a shard that lies ahead. Rows of a text file have their problems in a column PROBLEM.

        Raises ShardTooLarge.
        """
        end = shard.start + shard.rows
        shard_bytes = 0
        while self.next_row < end:
            check_interrupted()
            batch = self._unread
            if batch is None:
                batch = next(self.batches, None)
            if batch is None:
                raise CorruptParquet(
                    self._path, f"{end - self.next_row} rows fewer than its footer says"
                )

            # The batch may begin before the shard, and end after it. num_passed: its rows up to the shard's end.
            # num_before: its rows before the shard's beginning.
            num_passed = min(batch.num_rows, end - self.next_row)
            num_before = min(num_passed, max(0, shard.start - self.next_row))
            self._unread = batch.slice(num_passed) if num_passed < batch.num_rows else None
            self.next_row += num_passed
            if num_passed == num_before:  # no row of the batch is in the shard
                continue

            batch = batch.slice(num_before, num_passed - num_before)
            shard_bytes += batch.nbytes
            if shard_bytes > self._limit:
                widest = max(batch.schema.names, key=lambda name: batch.column(name).nbytes)
                problem = f"its rows have at least {shard_bytes} bytes once decoded, most in column {widest!r}"
                remedy = "submit with a smaller rows_per_shard"
                setting = f"{SHARD_TIMES} times TOKENMILL_MAX_SHARD_BYTES"
                raise ShardTooLarge(self._path, problem, self._limit, setting, remedy)
            yield batch
