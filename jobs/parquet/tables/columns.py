"""Columns of a table: their types, the ones that are kept, and the ones that are added."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.runs.plans.partitions import AddedColumn

#: Why a line of a file is no row, in a column of its own until the rows are written. A file's of this name is refused.
PROBLEM = "\0problem"

#: Of a run in an order of its own: which row of the whole input, from 0, a row is.
ROW_NUMBER = "row_number"

PROBLEM_FIELD = pa.field(PROBLEM, pa.string())

_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)


def is_text(kind: pa.DataType) -> bool:
    """Whether values are texts; a column of nulls alone may be meant as one."""
    return is_text(kind.value_type) if pa.types.is_dictionary(kind) else any(is_one(kind) for is_one in _TEXTS)


def is_bytes(kind: pa.DataType) -> bool:
    return is_bytes(kind.value_type) if pa.types.is_dictionary(kind) else any(is_one(kind) for is_one in _BYTES)


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


class ColumnChoice(NamedTuple):
    """Columns by name, or (`names` is None) all of a file but some. What the file has not is passed over."""

    names: Sequence[str] | None = None
    without: Sequence[str] = ()

    def of(self, found: Sequence[str]) -> list[str] | None:
        if self.names is not None:
            return [name for name in (*self.names, PROBLEM) if name in found]
        return [name for name in found if name not in self.without] if self.without else None


ALL_COLUMNS = ColumnChoice()

_TYPES = {"int64": pa.int64(), "string": pa.string()}


def with_added_fields(schema: pa.Schema, columns: Sequence[AddedColumn]) -> pa.Schema:
    """Return a file's schema and metadata with the added columns behind its own, unless planning has written them."""
    fields = [pa.field(column.name, _TYPES[column.type]) for column in columns if column.name not in schema.names]
    return pa.schema([*schema, *fields], metadata=schema.metadata)


def with_added_values(batch: pa.RecordBatch, columns: Sequence[AddedColumn], values: Sequence[Any]) -> pa.RecordBatch:
    schema = with_added_fields(batch.schema, columns)
    if len(schema) == batch.num_columns:  # which may have rows and no column
        return batch
    added = [
        pa.repeat(pa.scalar(value, _TYPES[column.type]), batch.num_rows)
        for column, value in zip(columns, values, strict=True)
        if column.name not in batch.schema.names
    ]
    return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema)
