"""Why a line of a file is no row: it goes with the rows as a column, until they are answered or written."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

#: No column of a file: a header or key of this name is refused.
PROBLEM = "\0problem"

_FIELD = pa.field(PROBLEM, pa.string())


def with_problems(batch: pa.RecordBatch, problems: Sequence[str | None]) -> pa.RecordBatch:
    """Append why each row is none, None where it is one."""
    return batch.append_column(_FIELD, pa.array(problems, pa.string()))


def split_problems(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[str | None]]:
    """Return the rows without that column, and what stood there; nothing for a format without lines."""
    place = batch.schema.get_field_index(PROBLEM)
    if place < 0:
        return batch, []
    return batch.remove_column(place), batch.column(place).to_pylist()
