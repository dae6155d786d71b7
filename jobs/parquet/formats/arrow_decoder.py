"""ArrowDecoder: the rows of an Arrow file or stream, record batch by record batch."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import CorruptTable, SchemaMismatch, ShardTooLarge
from jobs.parquet.column_choice import ColumnChoice
from jobs.parquet.formats.arrow_messages import Message, Messages, read_messages
from jobs.parquet.read_room import ReadRoom
from jobs.parquet.row_bounds import BATCH_ROWS, PAGES_TIMES

#: Types that few readers know, and what takes their place.
_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


@contextmanager
def arrow_damage(path: str) -> Iterator[None]:
    """Name the file where it, or what it holds, is not as the format has it. Raises CorruptTable."""
    try:
        yield
    except (ValueError, IndexError, struct.error, pa.ArrowException) as error:
        if isinstance(error, pa.ArrowMemoryError):
            raise
        reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
        raise CorruptTable(path, "Arrow", reason) from error


def look_at_arrow(path: str, source: Any) -> tuple[Messages, pa.Schema]:
    """Return what an open file holds, and its columns as they are read. Raises CorruptTable, or
    SchemaMismatch for a type that Parquet has not."""
    with arrow_damage(path):
        messages = read_messages(source)
        source.seek(0)
        opened = pa.ipc.open_file(source) if messages.is_file else pa.ipc.open_stream(source)
        schema = _plain_schema(opened.schema)
    for field in schema:
        try:
            pq.write_table(pa.schema([field]).empty_table(), io.BytesIO())
        except pa.ArrowException:
            what = f"its column {field.name!r} is of type {field.type}, which Parquet has not"
            raise SchemaMismatch(path, what) from None
    return messages, schema


class ArrowDecoder:
    """Decodes an open file once, from a record batch to its end.

    source: the caller closes it. columns: those that are read. footer: of another decoder of
    the same file. room: where a record batch is reserved before it is read.
    """

    row_bytes, widest = 0.0, ""

    def __init__(self, path: str, source: Any, columns: ColumnChoice, footer: Any, room: ReadRoom) -> None:
        self._path, self._source, self._room = path, source, room
        #: The file's messages and schema.
        self.footer: tuple[Messages, pa.Schema] = footer or look_at_arrow(path, source)
        self._messages = self.footer[0]
        self.schema = self.footer[1]
        self._names = columns.of(self.schema.names) or self.schema.names

    def batch_bytes(self, batch: pa.RecordBatch) -> int:
        """Return what a batch takes of buffers that others may share."""
        return int(batch.nbytes)

    def batches(self, first_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Raises ShardTooLarge, NoRoomYet, CorruptTable, and whatever pyarrow raises."""
        wanted = self._messages.batches[first_group:]
        self._check(wanted)
        self._room.reserve(self._messages.dictionaries)
        with arrow_damage(self._path):
            for message, batch in zip(wanted, self._read(first_group, wanted), strict=True):
                batch.validate(full=True)  # offsets and indices of a file may lead anywhere
                if batch.num_rows != message.rows:
                    raise ValueError(f"a record batch has {batch.num_rows} rows, expected {message.rows}")
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield self._plain(batch.slice(start, BATCH_ROWS))

    def _check(self, wanted: Sequence[Message]) -> None:
        limit = PAGES_TIMES * self._room.limit
        most = max((each.size for each in wanted), default=0) + self._messages.dictionaries
        if most > limit:
            what = f"a record batch, with the dictionaries, takes {most} bytes"
            remedy = "write the file with smaller record batches"
            raise ShardTooLarge(self._path, what, limit, f"{PAGES_TIMES} times ", remedy)

    def _read(self, first_group: int, wanted: Sequence[Message]) -> Iterator[pa.RecordBatch]:
        held = self._messages.dictionaries
        if self._messages.is_file:
            file = pa.ipc.open_file(self._source)
            for number, message in enumerate(wanted, first_group):
                self._room.reserve(held + 2 * message.size)
                yield file.get_batch(number)
            return
        skipped = {each.offset for each in self._messages.batches[:first_group]}
        kept = [each for each in self._messages.in_order if each.offset not in skipped]
        with (
            pa.PythonFile(_Spliced(self._source, kept), "r") as spliced,
            pa.ipc.open_stream(spliced) as stream,
        ):
            for message in wanted:
                self._room.reserve(held + 2 * message.size)
                yield stream.read_next_batch()

    def _plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = pa.schema([self.schema.field(name) for name in self._names], metadata=self.schema.metadata)
        arrays = [batch.column(name).cast(schema.field(name).type) for name in self._names]
        if not arrays:  # pyarrow takes the number of rows from a column
            return batch.select([0]).select([]) if batch.num_columns else batch
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Spliced(io.RawIOBase):
    """Some messages of a stream as if no other had stood between them."""

    def __init__(self, source: Any, messages: Sequence[Message]) -> None:
        self._source = source
        self._messages = iter(messages)
        self._at = self._left = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return so many bytes, fewer only at the end."""
        found = bytearray()
        while len(found) < size:
            if self._left == 0:
                message = next(self._messages, None)
                if message is None:
                    break
                self._at, self._left = message.offset, message.num_bytes
            taken: bytes = self._source.read_at(min(self._left, size - len(found)), self._at)
            if not taken:
                break
            self._at, self._left = self._at + len(taken), self._left - len(taken)
            found += taken
        return bytes(found)


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    fields = [field.with_type(_plain_type(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered)
    return _PLAIN.get(kind, kind)
