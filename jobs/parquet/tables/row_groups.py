"""Tables written as Parquet, in row groups of a size: a footer of many takes longer to read than its rows."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

#: Rows and bytes after which a row group ends; so many bytes have the batches that a worker gets, too.
GROUP_ROWS, GROUP_BYTES = 1 << 16, 1 << 23


def write_groups(sink: Any, schema: pa.Schema | None, batches: Iterable[pa.RecordBatch]) -> list[int]:
    """Write rows as Parquet; return how many each row group has. schema: is needed where there may be no row."""
    tables, groups = _groups(batches), list[int]()
    first = list(islice(tables, 1))
    with pq.ParquetWriter(sink, schema or first[0].schema) as writer:
        for table in chain(first, tables):
            writer.write_table(table)
            groups.append(table.num_rows)
    return groups


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        for piece in pieces(batch):
            waiting.append(piece)
            rows, size = rows + piece.num_rows, size + piece.nbytes
            if rows >= GROUP_ROWS or size >= GROUP_BYTES:
                yield pa.Table.from_batches(waiting)
                waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of GROUP_BYTES, where they have more than one row."""
    rows = max(1, batch.num_rows * GROUP_BYTES // max(GROUP_BYTES, batch.nbytes))
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))
