"""LineDecoder: the rows of a text file as Arrow, as the plan says what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from jobs.errors import CorruptTable
from jobs.parquet.column_choice import ColumnChoice
from jobs.parquet.formats.kinds import Kind, arrow_type, json_array, text_array
from jobs.parquet.formats.lines import lines_from
from jobs.parquet.formats.problems import with_problems
from jobs.parquet.formats.records import Record, records
from jobs.parquet.read_room import ReadRoom
from jobs.runs.plans.formats import HEADED
from jobs.runs.plans.plan import Block

#: Rows, and bytes of text, of one batch.
BATCH_ROWS, BATCH_BYTES = 1024, 1 << 21

#: What reading takes at most: a batch that ends with a long line, as text, as Python's objects and as
#: Arrow's.
HELD_BYTES = 1 << 25


class LineDecoder:
    """Decodes an open text file once, from a block to its end.

    stream: as lines.text_stream lends it; the caller closes it. kinds: of all columns. columns: those that
    are read. blocks, rows: the plan's; what stands behind these rows was not looked at. room: where what
    reading takes is reserved.
    """

    #: A shard's size is told by its batches alone.
    row_bytes, widest, footer = 0.0, "", None

    def __init__(
        self,
        path: str,
        stream: Any,
        file_format: str,
        kinds: Mapping[str, Kind],
        columns: ColumnChoice,
        blocks: Sequence[Block],
        rows: int,
        room: ReadRoom,
    ) -> None:
        self._path, self._stream, self._format, self._room = path, stream, file_format, room
        self._blocks, self._rows = blocks, rows
        chosen = columns.of(list(kinds))
        #: Name and kind of each column that is read, by its place among all.
        self._read = {
            place: (name, kind)
            for place, (name, kind) in enumerate(kinds.items())
            if chosen is None or name in chosen
        }
        self._width = len(kinds)
        self.schema = pa.schema([(name, arrow_type(kind)) for name, kind in kinds.items()])

    def batch_bytes(self, batch: pa.RecordBatch) -> int:
        """Return what a batch takes of buffers that others may share."""
        return int(batch.nbytes)

    def batches(self, first_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows, with their problems behind them. Raises NoRoomYet, CorruptTable, and whatever
        pyarrow raises."""
        self._room.reserve(HELD_BYTES)
        if not self._blocks:
            return
        block = self._blocks[first_group]
        rows: list[Record] = []
        begin = block.byte
        found = records(self._path, self._format, lines_from(self._path, self._stream, block))
        for each in islice(found, self._rows - block.row):
            rows.append(each)
            if len(rows) == BATCH_ROWS or each.behind.byte - begin > BATCH_BYTES:
                yield self._batch(rows)
                rows, begin = [], each.behind.byte
        if rows:
            yield self._batch(rows)

    def _batch(self, rows: Sequence[Record]) -> pa.RecordBatch:
        try:
            if self._format in HEADED:
                problems, arrays = self._from_fields(rows)
            else:
                problems, arrays = self._from_objects(rows)
        except (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException) as error:
            reason = f"rows from line {rows[0].line} on are not as they were planned: {str(error)[:200]}"
            raise CorruptTable(self._path, self._format, reason) from error
        names = [name for name, _ in self._read.values()]
        schema = pa.schema([self.schema.field(name) for name in names])
        if not names:  # pyarrow takes the number of rows from a column
            empty = pa.RecordBatch.from_arrays([pa.nulls(len(rows))], ["none"])
            return with_problems(empty, problems).select([1])
        return with_problems(pa.RecordBatch.from_arrays(arrays, schema=schema), problems)

    def _from_objects(self, rows: Sequence[Record]) -> tuple[list[str | None], list[pa.Array]]:
        objects = [{} if row.value is None else row.value for row in rows]
        arrays = [
            json_array([each.get(name) for each in objects], kind) for name, kind in self._read.values()
        ]
        return [row.problem for row in rows], arrays

    def _from_fields(self, rows: Sequence[Record]) -> tuple[list[str | None], list[pa.Array]]:
        problems, fields = [], []
        for row in rows:
            problem = row.problem
            if problem is None and len(row.value) != self._width:
                problem = f"line {row.line} has {len(row.value)} fields, and the header {self._width}"
            problems.append(problem)
            fields.append(None if problem else row.value)
        arrays = [
            text_array([None if each is None else each[place] or None for each in fields], kind)
            for place, (_, kind) in self._read.items()
        ]
        return problems, arrays
