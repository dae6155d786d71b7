"""Parses answers that are JSON into two columns: values with the schema's types, and reasons why values are missing.

If rows have several prompts, there are two columns for each prompt with a schema. The names of these two columns begin
with the prompt's name.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.common.display import brief, is_unicode
from jobs.context.answers import Answer
from jobs.runs.plans import schema_types
from jobs.runs.plans.schema_types import ValueType

PARSED = "parsed"
PARSE_ERROR = "parse_error"
FINISH_REASON = "finish_reason"
#: Why an answer that ended at its limit of tokens has no value.
CUT_TEXT = "it was cut at max_tokens, before its JSON was whole"

_ARROW = {
    schema_types.INTEGER: pa.int64(),
    schema_types.NUMBER: pa.float64(),
    schema_types.STRING: pa.string(),
    schema_types.NUMBER_OR_TEXT: pa.string(),
    schema_types.BOOLEAN: pa.bool_(),
    schema_types.DATE: pa.date32(),
    schema_types.TIME_STAMP: pa.timestamp("us", "UTC"),
}


def arrow_type(kind: ValueType) -> pa.DataType:
    """Return the Arrow type of values that have one of a schema's types."""
    type_name = kind.kind
    if type_name == schema_types.OBJECT:
        fields = [(name, arrow_type(inner)) for name, inner in kind.fields.items()]
        return pa.struct(fields)
    if kind.item is None:
        return _ARROW[type_name]
    item_type = arrow_type(kind.item)
    if type_name == schema_types.ARRAY:
        return pa.list_(item_type)
    return pa.map_(pa.string(), item_type)


def parsed_fields(kinds: Mapping[str, ValueType], n: int) -> list[pa.Field]:
    """Return two columns for each prompt: its values, and the reasons for missing values.

    kinds: see RunSpec.parsed_types. n: how many answers each row has. If there are several, the columns hold lists.
    """
    fields = []
    for prompt, kind in kinds.items():
        value_type = arrow_type(kind)
        reason_type = pa.string()
        if n > 1:
            value_type = pa.list_(value_type)
            reason_type = pa.list_(reason_type)
        fields.append(pa.field(_column(prompt, PARSED), value_type))
        fields.append(pa.field(_column(prompt, PARSE_ERROR), reason_type))
    return fields


def _column(prompt: str, name: str) -> str:
    """Return the name of a prompt's column; `name` itself if rows have one prompt."""
    return f"{prompt}_{name}" if prompt else name


class Parsed(NamedTuple):
    """The value of an answer, or the reason why there is no value. Both are None for a row with an error."""

    value: Any = None
    reason: str | None = None


def parsed_row(kind: ValueType, answer: Answer, prompt: str = "") -> Parsed:
    """Parse a row's answer or answers. An answer that failed its check has the check's reason in place of a value.

    prompt: the name of the answered prompt if rows have several prompts; else "". A prompt's answer is parsed even if a
    later prompt of the row has an error.
    """
    # If the row has several answers, `texts` and `finish_reasons` are tuples.
    texts = answer.column(prompt) if prompt else answer.completion
    has_failed = answer.error is not None and not prompt
    if texts is None or has_failed:
        return Parsed()
    if answer.check_error is not None:
        return Parsed(reason=answer.check_error)
    finish_reasons = answer.column(_column(prompt, FINISH_REASON))
    if isinstance(texts, str):
        return parsed_text(kind, texts, finish_reasons)
    values = []
    reasons = []
    for text, finish_reason in zip(texts, finish_reasons, strict=True):
        parsed = Parsed() if text is None else parsed_text(kind, text, finish_reason)
        values.append(parsed.value)
        reasons.append(parsed.reason)
    return Parsed(values, reasons)  # type: ignore[arg-type]


def parsed_text(kind: ValueType, text: str, finish_reason: str = "") -> Parsed:
    """Parse one answer. finish_reason: why the answer ended."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_WrittenFloat)
    except (ValueError, RecursionError) as error:
        if finish_reason == "length":
            return Parsed(reason=CUT_TEXT)
        return Parsed(reason=f"it is not JSON: {error}")
    try:
        return Parsed(_value(kind, value, "$"))
    except _Unfit as error:
        return Parsed(reason=str(error))


class _WrittenFloat(float):
    """A number of JSON that remembers how it is written: 1.10 has other digits than 1.1."""

    def __init__(self, text: str) -> None:
        self.text = text


class _Unfit(Exception):
    """Raised with the reason why a value does not have the type of its column."""


def _value(kind: ValueType, value: Any, path: str) -> Any:
    """Return a value in the form that Arrow takes. Raises _Unfit."""
    if value is None and kind.is_nullable:
        return None
    type_name = kind.kind
    if type_name == schema_types.OBJECT and isinstance(value, dict):
        return _fields(kind, value, path)
    if type_name == schema_types.MAP and isinstance(value, dict):
        pairs = []
        for key, inner in value.items():
            pairs.append((_text(key, path), _inner(kind, inner, f"{path}.{key}")))
        return pairs
    if type_name == schema_types.ARRAY and isinstance(value, list):
        return [_inner(kind, inner, f"{path}[{index}]") for index, inner in enumerate(value)]
    if type_name == schema_types.BOOLEAN and isinstance(value, bool):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = _number(type_name, value)
        if number is not None:
            return number
    if isinstance(value, str):
        from_text = _from_text(type_name, _text(value, path))
        if from_text is not None:
            return from_text
    raise _Unfit(f"{path}: {brief(value)} is no {type_name}")


def _fields(kind: ValueType, value: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an object's values by name. Keys that the object's type does not name are left out."""
    for name in sorted(kind.required):
        if name not in value:
            raise _Unfit(f"{path}: {brief(name)} is a required property")
    values = {}
    for name, inner in kind.fields.items():
        if name in value:
            values[name] = _value(inner, value[name], f"{path}.{name}")
    return values


def _inner(kind: ValueType, value: Any, path: str) -> Any:
    """Return a value within a list or map of this type. Raises _Unfit."""
    assert kind.item is not None
    return _value(kind.item, value, path)


def _number(type_name: str, value: float) -> float | int | str | None:
    """Return a number as the float, int or text that a type asks for; None if the type has no such number."""
    if type_name == schema_types.NUMBER_OR_TEXT:
        return value.text if isinstance(value, _WrittenFloat) else str(value)
    if type_name == schema_types.NUMBER:
        try:
            return float(value)
        except OverflowError:
            return None
    is_whole = isinstance(value, int) or value.is_integer()
    fits_64_bits = -(2**63) <= value < 2**63
    if type_name == schema_types.INTEGER and is_whole and fits_64_bits:
        return int(value)
    return None


def _from_text(type_name: str, text: str) -> Any:
    """Return a text as a value of a type: the text itself, a date or a time. Return None if it is no such value."""
    if type_name in (schema_types.STRING, schema_types.NUMBER_OR_TEXT):
        return text
    try:
        if type_name == schema_types.DATE:
            return date.fromisoformat(text)
        if type_name == schema_types.TIME_STAMP:
            time = datetime.fromisoformat(text)
            return None if time.tzinfo is None else time
    except ValueError:
        pass
    return None


def _text(text: str, path: str) -> str:
    """Return the text itself. Raises _Unfit if the text is no valid Unicode."""
    if not is_unicode(text):
        raise _Unfit(f"{path}: a text is no valid Unicode")
    return text


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no value of JSON")


def parsed_columns(
    kinds: Mapping[str, ValueType], answers: Sequence[Answer]
) -> dict[str, list[Any]]:
    """Return the values of the columns of `parsed_fields`, by their names."""
    columns = {}
    for prompt, kind in kinds.items():
        rows = [parsed_row(kind, answer, prompt) for answer in answers]
        columns[_column(prompt, PARSED)] = [row.value for row in rows]
        columns[_column(prompt, PARSE_ERROR)] = [row.reason for row in rows]
    return columns
