"""Files of strangers as children read them: the worker gives them the bytes, and gets Arrow's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from sandbox import ChildDied, ChildFailed, ChildOutOfMemory, Limits

from .. import errors
from ..context.children import CHILDREN
from ..context.shard_bytes import DEFAULT_BYTES
from ..errors import TableNotRead
from ..runs.formats import PARQUET
from ..runs.plan import Block, Plan, PlannedFile
from .column_choice import ALL_COLUMNS, ColumnChoice
from .storage import Storage, reading

#: Seconds in which a child has to reply with a batch, or ask for bytes.
LIMIT_S = 30.0

#: The part of TOKENMILL_MAX_SHARD_BYTES that a child may take, and what it may take at least.
CHILD_SHARE, MIN_BYTES = 3 / 8, 64 << 20

#: Rows of a batch: at first, and where so many have taken too much memory.
BATCH_ROWS = (4096, 32, 1)

_TASKS = "jobs.parquet.table_child"


@dataclass(frozen=True)
class Table:
    """How one file of a run is read: its format, and of a text file what the plan knows of it."""

    input_format: str = PARQUET
    kinds: tuple[tuple[str, Any], ...] = ()
    blocks: tuple[Block, ...] = ()
    rows: int = 0

    @classmethod
    def of(cls, plan: Plan, file: PlannedFile) -> Table:
        return cls(plan.input_format, plan.columns, file.blocks, file.rows)


PARQUET_TABLE = Table()


@dataclass(frozen=True)
class Contents:
    """What a look at a file tells. groups: rows and bytes of each. stored_bytes: of data and footer.

    metadata: of a Parquet file, by keys.
    """

    schema: pa.Schema
    groups: list[tuple[int, int]]
    rows: int = 0
    stored_bytes: int = 0
    metadata: Mapping[str, bytes] = field(default_factory=dict)


def look_at(
    storage: Storage, path: str, table: Table = PARQUET_TABLE, limit: int = DEFAULT_BYTES
) -> Contents:
    """Return what a Parquet or Arrow file holds.

    limit: of the process, in bytes, as of ShardBytes. Raises CorruptParquet, CorruptTable, TableNotRead, or
    InputNotFound.
    """
    for is_last in (False, True):
        file = _OpenTable(storage, path, table, limit)
        try:
            with file:
                ((found, schema),) = file.replies("look", {})
            metadata = {key: bytes.fromhex(value) for key, value in found.pop("metadata", {}).items()}
            return Contents(pa.ipc.read_schema(pa.py_buffer(schema)), **found, metadata=metadata)
        except ChildFailed as error:
            if is_last or not isinstance(error, ChildDied):
                raise TableNotRead(path, str(error)) from None
    raise AssertionError


class TableReading:
    """One pass over a file from a group of its rows to the end.

    schema: of the whole file. columns: that are read; a name that is not there is passed over. limit: see
    look_at. Raises what look_at does; a child that was killed is replaced once, and one that takes too much
    memory is asked for fewer rows at a time.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        columns: ColumnChoice = ALL_COLUMNS,
        table: Table = PARQUET_TABLE,
        first_group: int = 0,
        limit: int = DEFAULT_BYTES,
    ) -> None:
        self._open: Callable[[], _OpenTable] = lambda: _OpenTable(storage, path, table, limit)
        self._path, self._columns, self._first_group = path, columns, first_group
        self._rows_done, self._sizes = 0, list(BATCH_ROWS)
        self._file: _OpenTable | None = None
        self._was_replaced = False
        while self._file is None:
            self._begin()

    def _begin(self) -> None:
        """Have a child open the file; where that fails, there is none, and it may be tried again."""
        self._file = self._open()
        question = {
            "columns": self._columns,
            "first_group": self._first_group,
            "skip": self._rows_done,
            "rows": self._sizes[0],
        }
        try:
            self._file.__enter__()
            self._replies = self._file.replies("read", question)
            _, schema = next(self._replies)
            self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(schema))
        except ChildFailed as error:
            self._replace(error)
        except BaseException:
            self.close()
            raise

    def _replace(self, error: ChildFailed) -> None:
        """Close the file, to be opened anew. Raises TableNotRead where that is of no use."""
        self.close()
        if isinstance(error, ChildDied) and not self._was_replaced:
            self._was_replaced = True
        elif isinstance(error, ChildOutOfMemory) and len(self._sizes) > 1:
            del self._sizes[0]
        else:
            raise TableNotRead(self._path, str(error)) from None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, once."""
        while True:
            try:
                if self._file is None:
                    self._begin()
                    continue
                for _, body in self._replies:
                    batch = pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
                    self._rows_done += batch.num_rows
                    yield batch
                return
            except ChildFailed as error:
                self._replace(error)

    def close(self) -> None:
        """Close the file; may be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            file.__exit__(None, None, None)


class _OpenTable:
    """A file that is open here, and a child that is given its bytes."""

    def __init__(self, storage: Storage, path: str, table: Table, limit: int) -> None:
        self._storage, self._path, self._table = storage, path, table
        self._limits = Limits(LIMIT_S, max(MIN_BYTES, int(limit * CHILD_SHARE)))
        self._resources = ExitStack()

    def __enter__(self) -> None:
        with self._reading(), ExitStack() as stack:
            self._source = stack.enter_context(self._storage.open_input(self._path))
            self._child = stack.enter_context(CHILDREN.lent())
            self._resources = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def replies(
        self, task: str, question: Mapping[str, Any]
    ) -> Generator[tuple[dict[str, Any], bytearray], None, None]:
        """Yield what a task replies. Raises what is wrong with the file, and ChildFailed."""
        asked = {"path": self._path, "table": asdict(self._table), "size": self._source.size(), **question}
        replies = self._child.replies(f"{_TASKS}:{task}", asked, self._limits, fetch=self._fetch)
        self._resources.callback(replies.close)
        for message, body in replies:
            if "error" in message:
                replies.close()
                raise getattr(errors, message["error"])(*message["args"])
            yield message, body

    def _fetch(self, wanted: Mapping[str, Any]) -> bytes:
        self._storage.check_interrupted()
        with self._reading():
            found: bytes = self._source.read_at(wanted["size"], wanted["at"])
        return found

    def _reading(self) -> AbstractContextManager[None]:
        """Name the file in what goes wrong when its bytes are read."""
        file_format = self._table.input_format
        return reading(self._path, None if file_format == PARQUET else file_format)
