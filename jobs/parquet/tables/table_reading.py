"""Files of strangers as children read them: the worker gives them the bytes, and gets Arrow's."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pyarrow as pa

from jobs import errors
from jobs.context.children import CHILDREN
from jobs.context.shared_files import DEFAULT_BYTES
from jobs.errors import TableNotRead
from jobs.parquet.files.storage import Storage, reading
from jobs.parquet.tables.columns import ALL_COLUMNS, ColumnChoice
from jobs.parquet.tables.line_problems import without_problems
from sandbox import ChildDied, ChildFailed, ChildOutOfMemory, Limits

#: Seconds in which a child has to reply with a batch, or ask for bytes.
LIMIT_S = 30.0

#: The part of TOKENMILL_MAX_SHARD_BYTES that a child may take, and what it may take at least.
CHILD_SHARE, MIN_BYTES = 3 / 8, 64 << 20

#: Rows of a batch: at first, and where so many have taken too much memory.
BATCH_ROWS = (4096, 32, 1)

_TASKS = "jobs.parquet.tables.table_child"

T = TypeVar("T")


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


def look_at(storage: Storage, path: str, limit: int = DEFAULT_BYTES) -> Contents:
    """Return what a Parquet file holds.

    limit: of the process, in bytes, as of ShardBytes. Raises CorruptParquet, TableNotRead or InputNotFound.
    """

    def look() -> Contents:
        with OpenTable(storage, path, limit) as file:
            ((found, schema),) = file.replies(f"{_TASKS}:look", {})
        metadata = {key: bytes.fromhex(value) for key, value in found.pop("metadata", {}).items()}
        return Contents(read_schema(schema), **found, metadata=metadata)

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
    return without_problems(pa.ipc.read_schema(pa.py_buffer(schema)))


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
        first_group: int = 0,
        limit: int = DEFAULT_BYTES,
    ) -> None:
        self._open: Callable[[], OpenTable] = lambda: OpenTable(storage, path, limit)
        self._path, self._columns, self._first_group = path, columns, first_group
        self._rows_done, self._sizes = 0, list(BATCH_ROWS)
        self._file: OpenTable | None = None
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
            self._replies = self._file.replies(f"{_TASKS}:read", question)
            _, schema = next(self._replies)
            self.schema = read_schema(schema)
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


class OpenTable:
    """A file that is open here, and a child that is given its bytes."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        limit: int,
        input_format: str | None = None,
        share: float = CHILD_SHARE,
    ) -> None:
        """limit: of the process, of which the child may take a share. input_format: None for Parquet."""
        self._storage, self._path, self._format = storage, path, input_format
        self._limits = Limits(LIMIT_S, max(MIN_BYTES, int(limit * share)))
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with self._reading(), ExitStack() as stack:
            self._source = stack.enter_context(self._storage.open_input(self._path))
            self._child = stack.enter_context(CHILDREN.lent())
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def __del__(self) -> None:
        """Let go of file and child where an exception kept whoever had them from closing them."""
        self._resources.close()

    def replies(
        self, task: str, question: Mapping[str, Any]
    ) -> Generator[tuple[dict[str, Any], bytearray], None, None]:
        """Yield what a task replies. Raises what is wrong with the file, and ChildFailed."""
        own = {"path": self._path, "input_format": self._format, "size": self._source.size()}
        replies = self._child.replies(task, {**own, **question}, self._limits, fetch=self._fetch)
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
        return reading(self._path, self._format)
