"""Finds the type of a column for values of a JSON schema.

The module needs no pyarrow. So the CLI can use it, and refuse a schema before the run is submitted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from jobs.common.display import brief, is_unicode
from jobs.errors import InvalidJob

#: The most values that a schema may describe. Lists and objects count too.
MAX_TYPES = 10_000
MAX_DEPTH = 50

# The kinds of values.
INTEGER = "integer"
NUMBER = "number"
STRING = "string"
#: A value that is a number or a text, as Pydantic describes a `Decimal`. Its column holds texts.
NUMBER_OR_TEXT = "number or text"
BOOLEAN = "boolean"
DATE = "date"
TIME_STAMP = "date-time"
ARRAY = "array"
OBJECT = "object"
MAP = "map"

#: Formats of texts that have a type of their own.
_FORMATS = {"date": DATE, "date-time": TIME_STAMP}


@dataclass(frozen=True)
class ValueType:
    """The type of a value.

    kind: a constant of this module, such as INTEGER. fields: the types of an object's values, by name.
    required: the names that an object must have. item: the type of an array's items, or of a map's values.
    is_nullable: whether the value may be null.
    """

    kind: str
    fields: Mapping[str, "ValueType"] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    item: "ValueType | None" = None
    is_nullable: bool = False


def type_of_schema(schema: Any) -> ValueType:
    """Return the type of a schema's values. Raises InvalidJob for a schema whose values fit into no column."""
    return _Reader(schema).type_of(schema, path="$", references=())


class _Reader:
    """Finds the type of one schema. Counts the types in it, because a few references may stand for very many types."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._num_types = 0

    def type_of(self, schema: Any, path: str, references: tuple[str, ...]) -> ValueType:
        """Return the type of a part of the schema. Raises InvalidJob.

        path: where the part is, as a JSON path. references: each `$ref` that led to this part.
        """
        self._num_types += 1
        if self._num_types > MAX_TYPES:
            raise _unfit_schema_error(path, f"the schema names more than {MAX_TYPES} values")
        depth = path.count(".") + path.count("[")
        if depth > MAX_DEPTH:
            raise _unfit_schema_error(path, f"it is nested more than {MAX_DEPTH} times")
        if not isinstance(schema, dict):
            raise _unfit_schema_error(path, f"its schema is {brief(schema)}, which names no type")

        if "$ref" in schema:
            return self._type_of_reference(schema["$ref"], path, references)
        for keyword in ("anyOf", "oneOf", "allOf"):
            options = schema.get(keyword)
            if isinstance(options, list) and options:
                if keyword == "allOf" and len(options) > 1:
                    raise _unfit_schema_error(
                        path, "allOf of several schemas has no type of its own"
                    )
                return self._common_type(options, path, references)
        if "const" in schema:
            return _type_of_values([schema["const"]], path)
        if isinstance(schema.get("enum"), list):
            return _type_of_values(schema["enum"], path)
        kinds = schema.get("type")
        if isinstance(kinds, list):
            schemas_of_one_type = [{**schema, "type": kind} for kind in kinds]
            return self._common_type(schemas_of_one_type, path, references)
        return self._type_of_kind(kinds, schema, path, references)

    def _type_of_reference(
        self, reference: Any, path: str, references: tuple[str, ...]
    ) -> ValueType:
        """Return the type of the schema that a `$ref` names."""
        if reference in references:
            raise _unfit_schema_error(
                path, f"{brief(reference)} holds itself, and a column's type cannot"
            )
        schema = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _unfit_schema_error(path, f"{brief(reference)} is not in this schema")
        _, *steps = reference.split("/")  # "#/$defs/date" has the steps "$defs" and "date"
        for step in steps:
            # A JSON pointer writes / as ~1, and ~ as ~0.
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if not isinstance(schema, dict) or name not in schema:
                raise _unfit_schema_error(path, f"{brief(reference)} is not in this schema")
            schema = schema[name]
        return self.type_of(schema, path, (*references, reference))

    def _common_type(
        self, options: Iterable[Any], path: str, references: tuple[str, ...]
    ) -> ValueType:
        """Return the type that several schemas have in common. If one of them is null, the type is nullable."""
        types = []
        is_nullable = False
        for option in options:
            if isinstance(option, dict) and option.get("type") == "null":
                is_nullable = True
                continue
            types.append(self.type_of(option, path, references))
        return _common(types, is_nullable, path)

    def _type_of_kind(
        self, kind: Any, schema: Mapping[str, Any], path: str, references: tuple[str, ...]
    ) -> ValueType:
        """Return the type of a schema that names one kind of values. kind: the schema's `type`, which may be wrong."""
        if kind == STRING:
            text_format = str(schema.get("format"))
            return ValueType(_FORMATS.get(text_format, STRING))
        if kind in (INTEGER, NUMBER, BOOLEAN):
            return ValueType(kind)

        if kind == ARRAY:
            items = schema.get("items")
            if schema.get("prefixItems"):
                raise _unfit_schema_error(path, "prefixItems give each item a type of its own")
            return ValueType(ARRAY, item=self.type_of(items, f"{path}[]", references))

        if kind != OBJECT:
            problem = "null alone" if kind == "null" else "no type"
            raise _unfit_schema_error(path, f"its schema names {problem}")

        properties = schema.get("properties")
        if isinstance(properties, dict) and properties:
            fields = {}
            for name, inner in properties.items():
                if not is_unicode(name):
                    raise _unfit_schema_error(path, "the name of a property is no valid Unicode")
                fields[name] = self.type_of(inner, f"{path}.{name}", references)
            required = schema.get("required") or []
            if not isinstance(required, list) or not all(
                isinstance(name, str) for name in required
            ):
                raise _unfit_schema_error(
                    path, f"its required is {brief(required)}, no list of names"
                )
            return ValueType(OBJECT, fields, frozenset(required))

        values = schema.get("additionalProperties")
        if not isinstance(values, dict):
            raise _unfit_schema_error(path, "an object without properties has no columns")
        return ValueType(MAP, item=self.type_of(values, f"{path}.*", references))


def _type_of_values(values: Iterable[Any], path: str) -> ValueType:
    """Return the type that the values of an enum have in common. If one of them is null, the type is nullable."""
    types = []
    is_nullable = False
    for value in values:
        if value is None:
            is_nullable = True
            continue
        kind = _KINDS.get(type(value))
        if kind is None:
            raise _unfit_schema_error(
                path, f"{brief(value)} is a list or an object with no type of its own"
            )
        types.append(ValueType(kind))
    return _common(types, is_nullable, path)


_KINDS: Mapping[type, str] = {bool: BOOLEAN, int: INTEGER, float: NUMBER, str: STRING}


_NUMBERS_AND_TEXTS = frozenset({INTEGER, NUMBER, STRING, NUMBER_OR_TEXT})


def _common(types: list[ValueType], is_nullable: bool, path: str) -> ValueType:
    """Return the type of a column that holds values of all these types. Raises InvalidJob if no type fits."""
    if not types:
        raise _unfit_schema_error(path, "its schema names null alone")
    is_nullable = is_nullable or any(value_type.is_nullable for value_type in types)
    kinds = {value_type.kind for value_type in types}
    if kinds <= _NUMBERS_AND_TEXTS and ({NUMBER, STRING} <= kinds or NUMBER_OR_TEXT in kinds):
        return ValueType(NUMBER_OR_TEXT, is_nullable=is_nullable)

    common = replace(types[0], is_nullable=is_nullable)
    for value_type in types[1:]:
        other = replace(value_type, is_nullable=is_nullable)
        if {common.kind, other.kind} == {INTEGER, NUMBER}:
            common = replace(common, kind=NUMBER)
        elif common != other:
            different = common.kind
            if other.kind != common.kind:
                different += f" and {other.kind}"
            raise _unfit_schema_error(path, f"its values may have different types ({different})")
    return common


def _unfit_schema_error(path: str, reason: str) -> InvalidJob:
    """Return the error for a part of a schema that fits into no column."""
    return InvalidJob(
        f"parse: {path} of the schema fits into no column: {reason}; leave parse out, or give {path} one type"
    )
