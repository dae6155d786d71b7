"""A table's columns: their types, which are kept and added, and rows' values in them, as prompts and outputs show."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.errors import MissingColumn
from jobs.prompts.arguments import MAX_PROMPT_BYTES
from jobs.runs.plans.plan import AddedColumn

#: Why a line of a file is no row, in a column of its own until the rows are written. A file's of this name is refused.
PROBLEM = "\0problem"
#: The beginning of the names of extra columns, which hold each row's own JSON of a column of JSON lines. They go when
#: the rows are written. A file with a column of such a name is refused.
AS_JSON = "\0json:"
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
            beside = (AS_JSON + name for name in self.names)
            return [name for name in (*self.names, *beside, PROBLEM) if name in found]
        return [name for name in found if name not in self.without] if self.without else None


ALL_COLUMNS = ColumnChoice()


def missing_column(name: str, path: str, schema: pa.Schema) -> MissingColumn:
    """Return the error that says that a file lacks a column, and what it has."""
    there = ", ".join(map(repr, schema.names)) or "no columns"
    if {"custom_id", "body"} <= set(schema.names):
        there += " (if these are lines of OpenAI's batches, say --format openai-batch)"
    return MissingColumn(name, path, there)


def with_own_json(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch in which each row's own JSON replaces a column that has it."""
    beside = {name.removeprefix(AS_JSON): name for name in batch.schema.names if name.startswith(AS_JSON)}
    if not beside:
        return batch

    names = [name for name in batch.schema.names if not name.startswith(AS_JSON)]
    columns = [batch.column(beside.get(name, name)) for name in names]
    return pa.RecordBatch.from_arrays(columns, schema=schema_with_json(batch.select(names).schema, beside))


def schema_with_json(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """Return a schema in which these columns are texts of JSON."""
    fields = [pa.field(each.name, pa.string(), metadata=JSON) if each.name in names else each for each in schema]
    return pa.schema(fields, metadata=schema.metadata)


def with_added_fields(schema: pa.Schema, columns: Sequence[AddedColumn]) -> pa.Schema:
    """Return a file's schema and metadata with the added columns behind its own, unless planning has written them."""
    fields = [pa.field(column.name, column.type) for column in columns if column.name not in schema.names]
    return pa.schema([*schema, *fields], metadata=schema.metadata)


def with_added_values(batch: pa.RecordBatch, columns: Sequence[AddedColumn], values: Sequence[Any]) -> pa.RecordBatch:
    schema = with_added_fields(batch.schema, columns)
    if len(schema) == batch.num_columns:  # which may have rows and no column
        return batch
    added = [
        pa.repeat(pa.scalar(value, column.type), batch.num_rows)
        for column, value in zip(columns, values, strict=True)
        if column.name not in batch.schema.names
    ]
    return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema)


def num_values(column: pa.Array) -> int:
    """Return how many values a column's lists, structs and maps hold at all depths: each takes memory in Python."""
    if pa.types.is_struct(column.type):
        return sum(len(column) + num_values(each) for each in column.flatten())
    if pa.types.is_map(column.type):
        first, end = int(column.offsets[0].as_py()), int(column.offsets[-1].as_py())
        return 2 * (end - first) + num_values(column.items.slice(first, end - first))
    if is_list(column.type):
        values = column.flatten()
        return len(values) + num_values(values)
    return 0


def holds(kind: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Whether values are of a kind, such as `is_bytes`, or have some of it in them."""
    inner = range(kind.num_fields) if pa.types.is_nested(kind) else ()
    return is_one(kind) or any(holds(kind.field(number).type, is_one) for number in inner)


def with_dicts(value: Any, kind: pa.DataType) -> Any:
    """Return a value as Arrow gives it with dicts for its maps, in which of equal keys the last one counts."""
    if isinstance(value, list) and pa.types.is_map(kind):
        return {f"{key}": with_dicts(item, kind.item_type) for key, item in value}
    if isinstance(value, list):
        return [with_dicts(each, kind.value_type) for each in value]
    if isinstance(value, dict):
        return {kind.field(name).name: with_dicts(each, kind.field(name).type) for name, each in value.items()}
    return value


#: What Arrow raises for a value that Python's types cannot hold, such as text that is not UTF-8 or a date after 9999.
_NO_PYTHON_VALUE = (ValueError, OverflowError, KeyError, pa.ArrowException)
#: The largest value of which a prompt could be made: a chat's JSON may write a character in six.
MAX_VALUE_BYTES = 6 * MAX_PROMPT_BYTES
#: Values within a list, struct or map, at all depths: as Python's, each takes a hundred bytes.
MAX_NESTED_VALUES = 100_000
#: The metadata of a column that had integers beside floats, all exact as floats: they keep their text.
NUMBER = {b"tokenmill": b"number"}
#: The metadata of a text column with numbers only, written otherwise than their type would write them.
DIGITS = {b"tokenmill": b"digits"}
#: The metadata of columns of floats with a decimal comma: floats alone, or integers too.
COMMA, COMMA_NUMBER = {b"tokenmill": b"comma"}, {b"tokenmill": b"comma number"}
#: The metadata of a text column whose values are JSON. Prompts get the values that the JSON holds.
JSON = {b"tokenmill": b"json"}
#: The key of metadata that say how templates write a column. Outputs leave it out.
_OWN_KEY = b"tokenmill"
OWN_METADATA = frozenset({_OWN_KEY})
#: Values are converted together up to so many bytes, and else row by row.
_TOGETHER_BYTES = 1 << 20


class RowProblem(Exception):
    """Raised when a row cannot be a prompt; the text goes into the row's `error` and the rest goes on."""


def python_rows(columns: Sequence[str], rows: pa.RecordBatch) -> Iterator[dict[str, Any] | RowProblem]:
    """Yield the values of each row in some columns by name, or why one of them is none."""
    if not columns:
        yield from repeat({}, rows.num_rows)
    found = [as_written(rows.field(name), row_values(name, rows.column(name))) for name in columns]
    for row in zip(*found, strict=True):
        problem = next((value for value in row if isinstance(value, RowProblem)), None)
        yield problem or dict(zip(columns, row, strict=True))


def has_digits(field: pa.Field) -> bool:
    """Whether a text column holds only numbers."""
    return DIGITS.items() <= (field.metadata or {}).items()


def as_written(field: pa.Field, values: Iterator[Any]) -> Iterator[Any]:
    """Yield a column's values as the file that it comes from writes them."""
    written = (field.metadata or {}).get(_OWN_KEY)
    if written in (NUMBER[_OWN_KEY], COMMA_NUMBER[_OWN_KEY]):
        values = (int(each) if isinstance(each, float) and each.is_integer() else each for each in values)
    if written in (COMMA[_OWN_KEY], COMMA_NUMBER[_OWN_KEY]):
        return (f"{each}".replace(".", ",") if isinstance(each, float) else each for each in values)
    if written == JSON[_OWN_KEY]:
        return (_from_json(field.name, each) if isinstance(each, str) else each for each in values)
    return values


_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


def _from_json(name: str, text: str) -> Any:
    """Return the value of JSON that we wrote, or a problem if it holds too many values for Python."""
    if len(text) > MAX_NESTED_VALUES:
        marks = _JSON_TEXT.sub("", text)
        count = sum(map(marks.count, ",[{"))
        if count > MAX_NESTED_VALUES:
            return _beyond(name, count, "values", MAX_NESTED_VALUES)
    return json.loads(text)


def row_values(name: str, column: pa.Array, is_ours: bool = False) -> Iterator[Any]:
    """Return each row's value, or its RowProblem; maps are dicts. is_ours: computed ones may be larger than prompts."""
    values = (each.as_py() for each in column) if is_ours else _python_values(name, column)
    if not holds(column.type, pa.types.is_map):
        return values
    return (each if isinstance(each, RowProblem) else with_dicts(each, column.type) for each in values)


def _python_values(name: str, column: pa.Array) -> Iterator[Any]:
    if _num_bytes(column) <= _TOGETHER_BYTES and num_values(column) <= MAX_NESTED_VALUES:
        try:
            values = column.to_pylist()
        except _NO_PYTHON_VALUE:
            pass
        else:
            return iter(values)
    return (_value(name, column.slice(row, 1)) for row in range(len(column)))


def _num_bytes(column: pa.Array) -> int:
    size = int(column.nbytes)
    if pa.types.is_dictionary(column.type):
        size += len(column) * int(column.dictionary.nbytes)
    return size + num_values(column)


def _value(name: str, row: pa.Array) -> Any:
    try:
        return _too_large(name, row) or row[0].as_py()
    except UnicodeDecodeError as error:
        return RowProblem(f"text is not UTF-8: {error.reason} at byte {error.start}")
    except _NO_PYTHON_VALUE as error:
        return RowProblem(f"the value of type {row.type} cannot be read: {str(error)[:200]}")


def _too_large(name: str, row: pa.Array) -> RowProblem | None:
    scalar = row[0]
    if isinstance(scalar, pa.DictionaryScalar):
        scalar = scalar.value
    if not scalar.is_valid:
        return None
    if pa.types.is_nested(row.type):
        size, count = _num_bytes(row), num_values(row)
    else:
        size, count = scalar.as_buffer().size if isinstance(scalar, pa.BinaryScalar | pa.StringScalar) else 0, 0
    for found, unit, limit in ((count, "values", MAX_NESTED_VALUES), (size, "bytes", MAX_VALUE_BYTES)):
        if found > limit:
            return _beyond(name, found, unit, limit)
    return None


def _beyond(name: str, found: int, unit: str, limit: int) -> RowProblem:
    return RowProblem(f"column {name!r} has a value of {found} {unit}, more than the limit of {limit}: shorten it")
