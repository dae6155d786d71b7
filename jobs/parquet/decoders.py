"""Opens a file as its format is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from jobs.parquet.column_choice import ColumnChoice
from jobs.parquet.decoder import Decoder
from jobs.parquet.formats.arrow_decoder import ArrowDecoder
from jobs.parquet.formats.line_decoder import LineDecoder
from jobs.parquet.formats.lines import text_stream
from jobs.parquet.inputs import open_source
from jobs.parquet.read_room import ReadRoom
from jobs.parquet.storage import Storage, reading
from jobs.runs.plans.formats import ARROW, LINES, PARQUET
from jobs.runs.plans.plan import Block, Plan, PlannedFile


class TableDecoder(Protocol):
    """Decodes an open file once, from a row group, record batch or block of lines to the end.

    schema: of the whole file. footer: what another decoder of the same file need not look for again.
    row_bytes, widest: what a row of the batch that came last takes in all columns, as far as the format
    tells, and the column with most of it.
    """

    schema: pa.Schema
    footer: Any

    @property
    def row_bytes(self) -> float: ...
    @property
    def widest(self) -> str: ...
    def batches(self, first_group: int) -> Iterator[pa.RecordBatch]: ...
    def batch_bytes(self, batch: pa.RecordBatch) -> int: ...


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


@contextmanager
def opened_decoder(
    storage: Storage,
    path: str,
    table: Table,
    columns: ColumnChoice,
    used: ColumnChoice,
    footer: Any,
    room: ReadRoom,
) -> Iterator[TableDecoder]:
    """Open a file to decode it. columns, used, footer, room: see RowReader.

    What the body raises as pyarrow's errors is CorruptParquet or CorruptTable.
    """
    if table.input_format == PARQUET:
        with open_source(storage, path, footer, room.limit) as (source, file):
            names = file.schema_arrow.names
            footer = file.metadata if footer is None else footer
            yield Decoder(path, source, file, footer, columns.of(names), used.of(names), room)
        return
    with reading(path, table.input_format), storage.open_input(path) as source:
        if table.input_format in LINES:
            with text_stream(source) as stream:
                kinds = dict(table.kinds)
                yield LineDecoder(
                    path, stream, table.input_format, kinds, columns, table.blocks, table.rows, room
                )
        else:
            assert table.input_format == ARROW, table.input_format
            yield ArrowDecoder(path, source, columns, footer, room)
