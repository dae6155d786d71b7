"""Reads JSON schemas for what llguidance would take otherwise, and refuses that."""

from collections.abc import Iterator
from typing import Any

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems")
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        waiting += [part[key] for key in ONE if key in part]
        for key in MANY:
            if isinstance(part.get(key), list):
                waiting += part[key]
        for key in NAMED:
            if isinstance(part.get(key), dict):
                waiting += part[key].values()


def strings_of(schema: Any) -> Iterator[str]:
    """Yield the strings that a schema's texts hold as they are: names of properties, and values of const and enum."""
    for part in schemas_in(schema):
        if isinstance(part.get("properties"), dict):
            yield from part["properties"]
        if "const" in part:
            yield from _strings(part["const"])
        if "enum" in part:
            yield from _strings(part["enum"])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
    elif isinstance(value, dict):
        yield from value
        yield from _strings(list(value.values()))
