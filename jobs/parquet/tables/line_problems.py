"""Why a line of a file is no row: it goes with the rows as a column, until they are answered or written."""

import pyarrow as pa

#: No column of a file: a header or key of this name is refused.
PROBLEM = "\0problem"

PROBLEM_FIELD = pa.field(PROBLEM, pa.string())


def split_problems(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[str | None]]:
    """Return the rows without that column, and what stood there; nothing for a file without lines."""
    place = batch.schema.get_field_index(PROBLEM)
    if place < 0:
        return batch, []
    return batch.remove_column(place), batch.column(place).to_pylist()


def without_problems(schema: pa.Schema) -> pa.Schema:
    """Return a file's columns without that one."""
    place = schema.get_field_index(PROBLEM)
    return schema if place < 0 else schema.remove(place)
