"""The values of a column's rows in Python's types, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ..prompts.arguments import MAX_PROMPT_BYTES
from ..prompts.messages import MAX_MESSAGES

#: What Arrow raises for a value that Python's types cannot hold: text that is not UTF-8, which Parquet never
#: checks, a date after 9999, a time zone that is not known here, nanoseconds where pandas is not installed.
_NO_PYTHON_VALUE = (ValueError, OverflowError, KeyError, pa.ArrowException)

#: The largest value of which a prompt could be made: a chat's JSON may write a character in six.
MAX_VALUE_BYTES = 6 * MAX_PROMPT_BYTES

#: Values are converted together up to so many bytes, and else row by row.
_TOGETHER_BYTES = 1 << 20


class RowProblem(Exception):
    """Raised when a row cannot be a prompt; the text goes into the row's `error` and the rest goes on."""


def row_values(name: str, column: pa.Array) -> Iterator[Any]:
    """Return the value of each row of a column, or the RowProblem that it is."""
    if _num_bytes(column) <= _TOGETHER_BYTES:
        try:
            values = column.to_pylist()
        except _NO_PYTHON_VALUE:
            pass
        else:
            return iter(values)
    return (_value(name, scalar) for scalar in column)


def _num_bytes(column: pa.Array) -> int:
    """Return what a column's values take, at least a byte each; a dictionary's as often as they may stand."""
    try:
        size = int(column.nbytes)
    except pa.ArrowException:  # pyarrow before 20 does not know of views
        size = _TOGETHER_BYTES + 1
    if pa.types.is_dictionary(column.type):
        size += len(column) * int(column.dictionary.nbytes)
    if _has_elements(column.type):
        size += len(column.flatten())
    return size


def _value(name: str, scalar: pa.Scalar) -> Any:
    try:
        return _too_large(name, scalar) or scalar.as_py()
    except UnicodeDecodeError as error:
        return RowProblem(f"text is not UTF-8: {error.reason} at byte {error.start}")
    except _NO_PYTHON_VALUE as error:
        return RowProblem(f"the value of type {scalar.type} cannot be read: {str(error)[:200]}")


def _too_large(name: str, scalar: pa.Scalar) -> RowProblem | None:
    """Return the problem of a value that no prompt could hold, looked at while it is Arrow's."""
    if isinstance(scalar, pa.DictionaryScalar):
        scalar = scalar.value
    if not scalar.is_valid:
        return None
    if _has_elements(scalar.type):
        if len(scalar.values) > MAX_MESSAGES:
            return RowProblem(
                f"column {name!r} has a chat of {len(scalar.values)} messages, more than the limit of "
                f"{MAX_MESSAGES}: shorten it"
            )
        size = _num_bytes(scalar.values)
    else:
        size = scalar.as_buffer().size if isinstance(scalar, pa.BinaryScalar | pa.StringScalar) else 0
    if size > MAX_VALUE_BYTES:
        return RowProblem(
            f"column {name!r} has a value of {size} bytes, more than the limit of {MAX_VALUE_BYTES}: "
            "shorten it"
        )
    return None


def _has_elements(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
