"""SchemaDocument: the schemas inside a JSON schema, and those that its references name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = (
    "additionalProperties",
    "items",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "additionalItems",
)
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class SchemaDocument:
    """A JSON schema, and the names of the schemas inside it."""

    def __init__(self, root: Any) -> None:
        self.root = root
        address = root.get("$id") if isinstance(root, dict) else None
        self._address = address if isinstance(address, str) else ""
        self._by_address: dict[str, Any] = {"": root, urldefrag(self._address).url: root}
        self._by_anchor: dict[str, Any] = {}
        for schema in walk([root], parts_of):
            if isinstance(schema.get("$id"), str):
                self._by_address[self._joined(schema["$id"])[0]] = schema
            if isinstance(schema.get("$anchor"), str):
                self._by_anchor[schema["$anchor"]] = schema

    def schemas(self) -> Iterator[dict[str, Any]]:
        """Yield the whole schema, the schemas inside it, and those to which they refer, once each."""
        return walk([self.root], self.related)

    def related(self, schema: Mapping[str, Any]) -> list[Any]:
        """List the schemas directly inside a schema, and the one that it refers to."""
        return [*parts_of(schema), self.target(schema.get("$ref"))]

    def target(self, reference: object) -> Any:
        """Return the schema that a reference names; None if it is not in this document."""
        if not isinstance(reference, str):
            return None
        address, name = self._joined(reference)
        part = self._by_address.get(address)
        if part is None or name == "":
            return part
        if not name.startswith("/"):
            return self._by_anchor.get(name)
        for key in unquote(name).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict) and key in part:
                part = part[key]
            elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            else:
                return None
        return part

    def _joined(self, reference: str) -> tuple[str, str]:
        """Return a reference's address, in full, and the name of a place there."""
        try:
            joined = urldefrag(urljoin(self._address, reference))
        except ValueError:  # no address at all: llguidance reports it
            return reference, ""
        return joined.url, joined.fragment


def parts_of(schema: Mapping[str, Any]) -> list[Any]:
    """List the schemas directly inside a schema."""
    parts = [schema[key] for key in ONE if key in schema]
    for key in MANY:
        parts += listed(schema, key)
    for key in NAMED:
        parts += named(schema, key).values()
    return parts


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return a keyword's list; [] if it holds none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def named(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a keyword's object; {} if it holds none."""
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def walk(
    schemas: list[Any], following: Callable[[dict[str, Any]], list[Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the schemas that are objects, and those that `following` lists for each, once each."""
    waiting = [*schemas]
    seen = set[int]()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        waiting += following(schema)
