"""Added columns in Arrow: their fields, and a batch with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jobs.runs.plans.partitions import AddedColumn

_TYPES = {"int64": pa.int64(), "string": pa.string()}


def with_added_fields(schema: pa.Schema, columns: Sequence[AddedColumn]) -> pa.Schema:
    """Return a file's schema and metadata with the added columns behind its own."""
    fields = [pa.field(column.name, _TYPES[column.type]) for column in columns]
    return pa.schema([*schema, *fields], metadata=schema.metadata)


def with_added_values(
    batch: pa.RecordBatch, columns: Sequence[AddedColumn], values: Sequence[Any]
) -> pa.RecordBatch:
    """Append a file's values to a batch of its rows."""
    if not columns:
        return batch
    schema = with_added_fields(batch.schema, columns)
    added = [
        pa.repeat(pa.scalar(value, _TYPES[column.type]), batch.num_rows)
        for column, value in zip(columns, values, strict=True)
    ]
    return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema)
