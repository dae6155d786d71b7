"""Lists, structs and maps: how much they hold, and what they are in Python."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from jobs.parquet.tables.column_types import is_bytes, is_list


def num_values(column: pa.Array) -> int:
    """Return how many values stand in a column's lists, structs and maps, at all depths.

    Each may take memory in Python where it takes none in Arrow. Slices are counted as what they are of.
    """
    if pa.types.is_struct(column.type):
        return sum(len(column) + num_values(each) for each in column.flatten())
    if pa.types.is_map(column.type):
        first, end = int(column.offsets[0].as_py()), int(column.offsets[-1].as_py())
        return 2 * (end - first) + num_values(column.items.slice(first, end - first))
    if is_list(column.type):
        values = column.flatten()
        return len(values) + num_values(values)
    return 0


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether values are bytes, or have some in them."""
    if pa.types.is_nested(kind):
        return any(holds_bytes(kind.field(number).type) for number in range(kind.num_fields))
    return is_bytes(kind)


def holds_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return pa.types.is_nested(kind) and any(
        holds_map(kind.field(number).type) for number in range(kind.num_fields)
    )


def with_dicts(value: Any, kind: pa.DataType) -> Any:
    """Return a value as Arrow gives it with dicts for its maps: Arrow gives lists of pairs, and of equal keys
    the last one counts."""
    if isinstance(value, list) and pa.types.is_map(kind):
        return {_key(key): with_dicts(item, kind.item_type) for key, item in value}
    if isinstance(value, list):
        return [with_dicts(each, kind.value_type) for each in value]
    if isinstance(value, dict):
        return {
            kind.field(name).name: with_dicts(each, kind.field(name).type) for name, each in value.items()
        }
    return value


def _key(key: Any) -> str:
    return key if isinstance(key, str) else f"{key}"
