"""Kinds of columns that several of Arrow's types are."""

from __future__ import annotations

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Whether values are texts; a column of nulls alone may be meant as one."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )


def is_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_bytes(kind.value_type)
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
