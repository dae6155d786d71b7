"""The kinds of columns in text files. A column has the same kind in all files of a run.

The plan keeps each kind as JSON. There are the kinds "null", "bool", "int" (up to 2**53, which a float holds exactly),
"long" (up to 64 bits), "float", "number" (integers and floats), "text", {"list": kind} and {"struct": {name: kind}}.
If the values of a column have different kinds, the column is "json": texts stay as they are, other values become JSON.

A CSV file's column has a type only if that type writes each of its values exactly as the file does. Then prompts show
the file's text, and the output loses none of it. A column of floats is "float" if one of them is whole, such as 1.0,
and "fraction" if none is. Numbers that are written in another way (1.10, 1E5) are "digits". A column of digits is text.

If a file has decimal commas, its numbers may have points between thousands. A column of such digits is text for
templates, and numbers in the output.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from jobs.parquet.tables.columns import COMMA, COMMA_DIGITS, COMMA_NUMBER, DIGITS, NUMBER

Kind = str | dict[str, Any]

_SCALARS = {
    "null": pa.string(),  # a column of nulls needs a type too, because prompts may read the column
    "bool": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float": pa.float64(),
    "number": pa.float64(),
    "fraction": pa.float64(),
    "digits": pa.string(),
    "text": pa.string(),
    "json": pa.string(),
}
_KIND_BY_TYPE: Mapping[type, str] = {type(None): "null", bool: "bool", str: "text", float: "float"}
_JSON_NUMBERS = {"int", "float", "number"}
#: A float holds each integer up to this one exactly.
_EXACT = 1 << 53
#: No integer from here on fits into 64 bits.
_INT64 = 1 << 63
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
#: A number with points between thousands, with or without a decimal comma.
_GROUPED = re.compile(r"-?[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?:,[0-9]+)?")
#: The truth values of CSV files that a template writes in the same way.
_TRUTH = {"True", "False"}
#: The kind of a CSV column with numbers of two kinds. Any other two kinds of numbers make "digits".
_KIND_OF_PAIR: Mapping[frozenset[str], str] = {
    frozenset({"int", "long"}): "long",
    frozenset({"int", "fraction"}): "number",
    frozenset({"int", "number"}): "number",
    frozenset({"fraction", "number"}): "number",
    frozenset({"fraction", "float"}): "float",
}
_CSV_NUMBERS = {"int", "long", "fraction", "float", "number", "digits"}

#: A column with more nested levels of lists and objects than this is kept as JSON.
MAX_DEPTH = 20
#: A column whose objects have more distinct names than this is kept as JSON.
MAX_FIELDS = 1000


def merged(one: Kind, other: Kind) -> Kind:
    """Return the kind of a column that holds values of both kinds.

    If a part of the kind would be "json", the whole kind is "json".
    """
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    # From here on the kinds differ, and neither is "null".
    # Equal keys mean that both kinds are lists, or that both are structs.
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        if "list" in one:
            inner = merged(one["list"], other["list"])
            return "json" if inner == "json" else {"list": inner}
        fields = dict(one["struct"])
        for name, kind in other["struct"].items():
            fields[name] = merged(fields.get(name, "null"), kind)
            if fields[name] == "json" or len(fields) > MAX_FIELDS:
                return "json"
        return {"struct": fields}
    if isinstance(one, str) and isinstance(other, str):
        if {one, other} == {"int", "long"}:
            return "long"
        if {one, other} <= _JSON_NUMBERS:
            return "number"
    return "json"


#: A kind's name begins with this if its numbers have a decimal comma.
COMMA_KIND = "comma "


def with_decimal(kind: Kind, decimal: str) -> Kind:
    """Return the kind of a CSV file's column. If its numbers have decimal commas, COMMA_KIND is put before the kind."""
    may_have_decimals = kind in ("fraction", "float", "number", "digits")
    if decimal == "," and may_have_decimals:
        return f"{COMMA_KIND}{kind}"
    return kind


def merged_texts(one: Kind, other: Kind) -> Kind:
    """Return the kind of a CSV file's column that holds fields of both kinds.

    Two different kinds of numbers make a kind of numbers, or "digits". Any other two different kinds make "text".
    """
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    if isinstance(one, str) and isinstance(other, str):
        kinds = frozenset({one, other})
        if kinds <= _CSV_NUMBERS:
            # A column of "digits" is text, and keeps the numbers as the file writes them.
            return _KIND_OF_PAIR.get(kinds, "digits")
    return "text"


def kind_of(value: Any, depth: int = 0) -> Kind:
    """Return the kind of a value from JSON. depth: how many lists and objects hold it."""
    scalar_kind = _KIND_BY_TYPE.get(type(value))
    if scalar_kind is not None:
        return scalar_kind
    if isinstance(value, int):
        return _kind_of_integer(value, too_large="json")
    if depth == MAX_DEPTH:
        return "json"
    if isinstance(value, list):
        inner: Kind = "null"
        for item in value:
            inner = merged(inner, kind_of(item, depth + 1))
            if inner == "json":
                return "json"
        return {"list": inner}
    fields = {name: kind_of(item, depth + 1) for name, item in value.items()}
    if not fields or "json" in fields.values():  # Parquet has no type for an empty object
        return "json"
    return {"struct": fields}


def _kind_of_integer(value: int, too_large: str) -> str:
    """Return the kind of an integer. too_large: the kind of an integer that needs more than 64 bits."""
    size = abs(value)
    if size <= _EXACT:
        return "int"
    return "long" if size < _INT64 else too_large


def kind_of_texts(texts: Iterable[str], decimal: str = ".") -> Kind:
    """Return the kind of a CSV file's column. A decimal comma counts as a point here. An empty field counts as null.

    An integer that needs more than 64 bits is "digits". In a file with decimal commas such an integer is "text",
    because the output turns "digits" into floats there, and a float may not hold the integer exactly.
    """
    kind: Kind = "null"
    for text in set(texts) - {""}:
        kind = merged_texts(kind, _kind_of_text(text, decimal))
        if kind == "text":
            break
    return kind


def _kind_of_text(text: str, decimal: str) -> str:
    """Return the kind of a CSV field. The field is not empty."""
    has_decimal_commas = decimal == ","
    if has_decimal_commas and "." in text:  # such as 1.234,56
        return "digits" if _GROUPED.fullmatch(text) else "text"
    if has_decimal_commas:
        text = text.replace(",", ".")
    if text in _TRUTH:
        return "bool"
    if not _NUMBER.fullmatch(text):
        return "text"
    if _INTEGER.fullmatch(text) and text != "-0":  # as an integer, -0 would become 0
        kind_if_too_large = "text" if has_decimal_commas else "digits"
        return _kind_of_integer(int(text), kind_if_too_large)
    number = float(text)
    # With decimal commas, the output turns "digits" into floats. A float could not hold this large number exactly.
    if has_decimal_commas and number.is_integer() and abs(number) >= _INT64:
        return "text"
    # A template would not write this number as the file does.
    if repr(number) != text:
        return "digits"
    return "float" if number.is_integer() else "fraction"


#: The metadata of a column, by its kind. Metadata say how a template writes the column's values.
_METADATA_OF_KIND = {
    "number": NUMBER,
    "digits": DIGITS,
    "comma float": COMMA,
    "comma fraction": COMMA,
    "comma number": COMMA_NUMBER,
    "comma digits": COMMA_DIGITS,
}


def arrow_field(name: str, kind: Kind) -> pa.Field:
    """Return the Arrow field of a column. Raises KeyError, TypeError or AttributeError if `kind` is no kind."""
    metadata = _METADATA_OF_KIND.get(kind) if isinstance(kind, str) else None
    return pa.field(name, _arrow_type(kind), metadata=metadata)


def _arrow_type(kind: Kind) -> pa.DataType:
    """Return the Arrow type of a kind."""
    if isinstance(kind, str):
        return _SCALARS[kind.removeprefix(COMMA_KIND)]
    if "list" in kind:
        return pa.list_(_arrow_type(kind["list"]))
    fields = [pa.field(name, _arrow_type(inner)) for name, inner in kind["struct"].items()]
    return pa.struct(fields)


def json_array(values: Sequence[Any], kind: Kind) -> pa.Array:
    """Return a column of values from JSON. Raises pyarrow's errors if the values have another kind."""
    if kind == "json":
        values = [value if isinstance(value, str) else _json_text(value) for value in values]
    return pa.array(values, _arrow_type(kind))


def _json_text(value: Any) -> str | None:
    """Return a value as text of JSON. Null stays null."""
    return None if value is None else json.dumps(value, ensure_ascii=False)


def depends_on_other_rows(kind: Kind) -> bool:
    """Whether a value in a column of this kind may look different because of other rows, such as 1.0 in place of 1."""
    return kind in ("number", "json") or isinstance(kind, dict)


def own_json(values: Sequence[Any]) -> pa.Array:
    """Return a column with the JSON of each value."""
    return pa.array(list(map(_json_text, values)), pa.string())


def text_array(texts: Sequence[str | None], kind: Kind) -> pa.Array:
    """Return a column of a CSV file's fields. Raises pyarrow's errors if the fields have another kind."""
    arrow_type = _arrow_type(kind)
    has_decimal_commas = isinstance(kind, str) and kind.startswith(COMMA_KIND)
    becomes_float = has_decimal_commas and pa.types.is_floating(arrow_type)
    values: list[str | None] = []
    for text in texts:
        value = text or None  # an empty field is null
        if becomes_float and value is not None:
            value = value.replace(",", ".")
        values.append(value)
    return pa.array(values, pa.string()).cast(arrow_type)
