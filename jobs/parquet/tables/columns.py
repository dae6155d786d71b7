"""Handles a table's columns: which columns are kept and added, their types, and how prompts show their values."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jobs.errors import MissingColumn
from jobs.prompts.arguments import MAX_PROMPT_BYTES
from jobs.runs.plans.plan import AddedColumn

#: A column that says why a line of a file is no row. Outputs leave this column out. A file that has it is refused.
PROBLEM = "\0problem"
#: The beginning of the names of extra columns. Such a column holds each row's own JSON for another column of the file.
#: Outputs leave these columns out. A file that has one is refused.
AS_JSON = "\0json:"
#: A column that a run with an `order` adds: the row's number in the whole input, from 0.
ROW_NUMBER = "row_number"

PROBLEM_FIELD = pa.field(PROBLEM, pa.string())
#: Arrow's tests for types of texts, and for types of bytes.
_TEXT_TESTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_null,
)
_BYTES_TESTS = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_binary_view,
)


def is_text(data_type: pa.DataType) -> bool:
    """Whether values of a type are texts. A column that only has nulls counts as a column of texts."""
    if pa.types.is_dictionary(data_type):
        return is_text(data_type.value_type)
    return any(is_of_type(data_type) for is_of_type in _TEXT_TESTS)


def is_bytes(data_type: pa.DataType) -> bool:
    """Whether values of a type are bytes."""
    if pa.types.is_dictionary(data_type):
        return is_bytes(data_type.value_type)
    return any(is_of_type(data_type) for is_of_type in _BYTES_TESTS)


def is_list(data_type: pa.DataType) -> bool:
    """Whether values of a type are lists."""
    return bool(
        pa.types.is_list(data_type)
        or pa.types.is_large_list(data_type)
        or pa.types.is_fixed_size_list(data_type)
    )


class ColumnChoice(NamedTuple):
    """A choice of a file's columns. Names that the file does not have are ignored.

    names: the columns to read; None for all columns. without: the columns that are left out if `names` is None.
    """

    names: Sequence[str] | None = None
    without: Sequence[str] = ()

    def chosen_from(self, columns: Sequence[str]) -> list[str] | None:
        """Return which of a file's columns are chosen; None for all of them."""
        if self.names is not None:
            # Planning may have added a column of JSON for a chosen column, and a column of problems. They are read too.
            as_json = [AS_JSON + name for name in self.names]
            return [name for name in (*self.names, *as_json, PROBLEM) if name in columns]
        if not self.without:
            return None
        return [name for name in columns if name not in self.without]


ALL_COLUMNS = ColumnChoice()


def missing_column(name: str, path: str, schema: pa.Schema) -> MissingColumn:
    """Return the error for a column that a file lacks. It says which columns the file has."""
    columns = ", ".join(map(repr, schema.names)) or "no columns"
    if {"custom_id", "body"} <= set(schema.names):
        columns += " (if these are lines of OpenAI's batches, say --format openai-batch)"
    # pandas writes a name of several levels as Python writes a tuple, such as "('text', '')".
    if any(column.startswith("('") and column.endswith(")") for column in schema.names):
        columns += (
            " (if pandas made these of several levels, flatten them: "
            "frame.columns = ['_'.join(map(str, name)) for name in frame.columns])"
        )
    return MissingColumn(name, path, columns)


def with_own_json(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch in which the extra columns of JSON (see AS_JSON) replace the columns that they belong to."""
    # The name of each extra column, by the name of the column that it replaces.
    json_columns: dict[str, str] = {}
    names = []
    for name in batch.schema.names:
        if name.startswith(AS_JSON):
            json_columns[name.removeprefix(AS_JSON)] = name
        else:
            names.append(name)
    if not json_columns:
        return batch

    columns = []
    for name in names:
        source_name = json_columns.get(name, name)
        columns.append(batch.column(source_name))
    schema = schema_with_json(batch.select(names).schema, json_columns)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def schema_with_json(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """Return a schema in which the named columns are texts of JSON."""
    fields = []
    for field in schema:
        if field.name in names:
            fields.append(pa.field(field.name, pa.string(), metadata=JSON))
        else:
            fields.append(field)
    return pa.schema(fields, metadata=schema.metadata)


def with_added_fields(schema: pa.Schema, columns: Sequence[AddedColumn]) -> pa.Schema:
    """Return a file's schema with the added columns at its end.

    A file that planning has written may have these columns already. Then they are not added again.
    """
    fields = [
        pa.field(column.name, column.type) for column in columns if column.name not in schema.names
    ]
    return pa.schema([*schema, *fields], metadata=schema.metadata)


def with_added_values(
    batch: pa.RecordBatch, columns: Sequence[AddedColumn], values: Sequence[Any]
) -> pa.RecordBatch:
    """Return a batch with the added columns, which have one value each; see with_added_fields."""
    schema = with_added_fields(batch.schema, columns)
    if len(schema) == batch.num_columns:  # no column is added
        return batch  # it may have no columns, and a copy without columns would lose the number of rows
    arrays = list(batch.columns)
    for column, value in zip(columns, values, strict=True):
        if column.name not in batch.schema.names:
            scalar = pa.scalar(value, column.type)
            arrays.append(pa.repeat(scalar, batch.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def num_values(column: pa.Array) -> int:
    """Return how many values a column's lists, structs and maps hold, at all depths."""
    if pa.types.is_struct(column.type):
        # Each field has one value in each row.
        return sum(len(column) + num_values(inner) for inner in column.flatten())
    if pa.types.is_map(column.type):
        # A slice of a column still has the items of the whole column. The slice's own items lie between its offsets.
        first = int(column.offsets[0].as_py())
        end = int(column.offsets[-1].as_py())
        num_items = end - first
        num_keys = num_items
        return num_keys + num_items + num_values(column.items.slice(first, num_items))
    if is_list(column.type):
        values = column.flatten()
        return len(values) + num_values(values)
    return 0


def holds(data_type: pa.DataType, is_kind: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type is of a kind, or contains a type of that kind. is_kind: a test such as `is_bytes`."""
    if is_kind(data_type):
        return True
    if not pa.types.is_nested(data_type):
        return False
    inner_types = [data_type.field(number).type for number in range(data_type.num_fields)]
    return any(holds(inner_type, is_kind) for inner_type in inner_types)


def with_dicts(value: Any, data_type: pa.DataType) -> Any:
    """Return a value from Arrow with dicts in place of its maps. If a map has equal keys, the last value counts."""
    if isinstance(value, list) and pa.types.is_map(data_type):
        return {f"{key}": with_dicts(item, data_type.item_type) for key, item in value}
    if isinstance(value, list):
        return [with_dicts(item, data_type.value_type) for item in value]
    if isinstance(value, dict):
        return {name: with_dicts(item, data_type.field(name).type) for name, item in value.items()}
    return value


#: What Arrow raises for a value that Python's types cannot hold, such as text that is not UTF-8 or a date after 9999.
_NO_PYTHON_VALUE = (ValueError, OverflowError, KeyError, pa.ArrowException)
#: The most bytes of a value in a prompt. The JSON of a chat may write one character as six.
MAX_VALUE_BYTES = 6 * MAX_PROMPT_BYTES
#: The most values within a list, struct or map, at all depths. A value takes about a hundred bytes as a Python object.
MAX_NESTED_VALUES = 100_000
#: The metadata of a column of floats whose file also has integers. Templates write whole values as integers.
NUMBER = {b"tokenmill": b"number"}
#: The metadata of a text column that only has numbers, in a form that a column of numbers would not show.
DIGITS = {b"tokenmill": b"digits"}
#: The metadata of a column of floats with a decimal comma.
COMMA = {b"tokenmill": b"comma"}
#: The metadata of a column of floats and integers with a decimal comma.
COMMA_NUMBER = {b"tokenmill": b"comma number"}
#: The metadata of a text column that only has numbers with a decimal comma, in a form such as 7,00 or 1.234,56 that a
#: column of numbers would not show. Templates show the text, and the output has the numbers.
COMMA_DIGITS = {b"tokenmill": b"comma digits"}
#: The metadata of a text column whose values are JSON. Prompts get the values that the JSON holds.
JSON = {b"tokenmill": b"json"}
#: The key of all these metadata. Outputs leave it out.
_OWN_KEY = b"tokenmill"
OWN_METADATA = frozenset({_OWN_KEY})
#: Columns of at most this many bytes are converted at once. Larger columns are converted row by row.
_TOGETHER_BYTES = 1 << 20


class RowProblem(Exception):
    """Raised when no prompt can be made of a row. Its text becomes the row's `error`, and other rows go on."""


def python_rows(
    columns: Sequence[str], rows: pa.RecordBatch
) -> Iterator[dict[str, Any] | RowProblem]:
    """Yield each row's values by column, or the row's problem if a value cannot be read."""
    if not columns:
        yield from repeat({}, rows.num_rows)
        return
    values_by_column = []
    for name in columns:
        values_of_column = row_values(name, rows.column(name))
        values_by_column.append(as_written(rows.field(name), values_of_column))
    for values in zip(*values_by_column, strict=True):
        problems = [value for value in values if isinstance(value, RowProblem)]
        if problems:
            yield problems[0]
        else:
            yield dict(zip(columns, values, strict=True))


def has_digits(field: pa.Field) -> bool:
    """Whether a text column holds only numbers."""
    return _form(field) in (DIGITS[_OWN_KEY], COMMA_DIGITS[_OWN_KEY])


def has_comma_digits(field: pa.Field) -> bool:
    """Whether a text column holds only numbers with a decimal comma."""
    return _form(field) == COMMA_DIGITS[_OWN_KEY]


def _form(field: pa.Field) -> bytes | None:
    """Return the form in which a column's file writes its values (see NUMBER, COMMA, JSON); None for the usual form."""
    metadata: dict[bytes, bytes] = field.metadata or {}
    return metadata.get(_OWN_KEY)


def as_number(field: pa.Field, column: pa.Array) -> pa.Array:
    """Return the numbers of a text column with decimal commas. Any other column stays as it is."""
    if not has_comma_digits(field):
        return column
    without_points = pc.replace_substring(column, ".", "")
    return pc.replace_substring(without_points, ",", ".").cast(pa.float64())


def as_written(field: pa.Field, values: Iterator[Any]) -> Iterator[Any]:
    """Yield a column's values as its file writes them."""
    form = _form(field)
    has_integers = form in (NUMBER[_OWN_KEY], COMMA_NUMBER[_OWN_KEY])
    has_commas = form in (COMMA[_OWN_KEY], COMMA_NUMBER[_OWN_KEY])
    if has_integers:
        values = map(_whole_as_integer, values)
    if has_commas:
        values = map(_with_comma, values)
    if form == JSON[_OWN_KEY]:
        return (_from_json(field.name, value) for value in values)
    return values


def _whole_as_integer(value: Any) -> Any:
    """Return a whole float as an integer, and any other value as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _with_comma(value: Any) -> Any:
    """Return a float as a text with a decimal comma, and any other value as it is."""
    if isinstance(value, float):
        return f"{value}".replace(".", ",")
    return value


_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


def _from_json(name: str, text: Any) -> Any:
    """Return the value of a JSON text that planning has written, or a problem if the JSON holds too many values.

    text: the JSON. A null or a problem in place of a text is returned as it is.
    """
    if not isinstance(text, str):
        return text
    if len(text) > MAX_NESTED_VALUES:
        # Each value comes after a comma or after the sign that opens a list or an object, so these signs are counted.
        without_texts = _JSON_TEXT.sub("", text)
        count = sum(without_texts.count(sign) for sign in ",[{")
        if count > MAX_NESTED_VALUES:
            return _above_limit(name, count, "values", MAX_NESTED_VALUES)
    return json.loads(text)


def row_values(name: str, column: pa.Array, are_answers: bool = False) -> Iterator[Any]:
    """Return an iterator over each row's value, or its RowProblem. Maps become dicts.

    are_answers: whether the values are answers, which may be larger than a prompt.
    """
    values = (scalar.as_py() for scalar in column) if are_answers else _python_values(name, column)
    if holds(column.type, pa.types.is_map):
        values = _maps_as_dicts(values, column.type)
    return values


def _maps_as_dicts(values: Iterable[Any], data_type: pa.DataType) -> Iterator[Any]:
    """Yield a column's values and problems, with dicts in place of Arrow's maps."""
    for value in values:
        is_problem = isinstance(value, RowProblem)
        yield value if is_problem else with_dicts(value, data_type)


def _python_values(name: str, column: pa.Array) -> Iterator[Any]:
    """Return an iterator over each row's value, or its RowProblem. A small column is converted in one call."""
    if _num_bytes(column) <= _TOGETHER_BYTES and num_values(column) <= MAX_NESTED_VALUES:
        with suppress(*_NO_PYTHON_VALUE):
            return iter(column.to_pylist())
    # The column is large, or a value in it cannot be read. So each value is converted by itself.
    return (_value(name, column.slice(row, 1)) for row in range(len(column)))


def _num_bytes(column: pa.Array) -> int:
    """Return about how many bytes a column's values take in Python."""
    size = int(column.nbytes)
    if pa.types.is_dictionary(column.type):
        # In Python, each row has its own copy of an entry. At worst, one entry has nearly all bytes of the dictionary,
        # and each row has this entry.
        size += len(column) * int(column.dictionary.nbytes)
    # Arrow stores some values without bytes, such as those of type null. So each inner value counts as one more byte.
    return size + num_values(column)


def _value(name: str, row: pa.Array) -> Any:
    """Return the one value in `row`, or its RowProblem. name: the column's name."""
    try:
        problem = _too_large(name, row)
        if problem is not None:
            return problem
        return row[0].as_py()
    except UnicodeDecodeError as error:
        return RowProblem(f"text is not UTF-8: {error.reason} at byte {error.start}")
    except _NO_PYTHON_VALUE as error:
        return RowProblem(f"the value of type {row.type} cannot be read: {str(error)[:200]}")


def _too_large(name: str, row: pa.Array) -> RowProblem | None:
    """Return the problem if the one value in `row` is too large for a prompt; else None."""
    scalar = row[0]
    if isinstance(scalar, pa.DictionaryScalar):
        scalar = scalar.value
    if not scalar.is_valid:
        return None
    num_bytes = 0
    count = 0
    if pa.types.is_nested(row.type):
        num_bytes = _num_bytes(row)
        count = num_values(row)
    elif isinstance(scalar, pa.BinaryScalar | pa.StringScalar):
        num_bytes = scalar.as_buffer().size
    if count > MAX_NESTED_VALUES:
        return _above_limit(name, count, "values", MAX_NESTED_VALUES)
    if num_bytes > MAX_VALUE_BYTES:
        return _above_limit(name, num_bytes, "bytes", MAX_VALUE_BYTES)
    return None


def _above_limit(name: str, size: int, unit: str, limit: int) -> RowProblem:
    """Return the problem of a value that is larger than a limit."""
    return RowProblem(
        f"column {name!r} has a value of {size} {unit}, more than the limit of {limit}: shorten it"
    )
