"""Refuses JSON schemas in which a value must hold another value, and so on without end.

An answer in such a form would only end at max_tokens. The schemas of a value are read as a rule of a grammar:
alternatives, each a list of values that the value must hold. A value ends if all values of some alternative end.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from engine.structured.schema_parts import SchemaDocument, listed, named

#: The most values that a schema is read as. The choices of an `anyOf` multiply where several hold together.
MAX_VALUES = 20_000

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "object", "array"})


class NotEnforceable(ValueError):
    """Raised with the reason when llguidance would misread a schema."""


class _Value(NamedTuple):
    """A value of a document, as the schemas that it must satisfy, all at once.

    schemas: ids of the schemas, by Python's id(). chosen: ids of lists of choices, such as an `anyOf`, of which one
    choice is among the schemas.
    """

    schemas: frozenset[int]
    chosen: frozenset[int] = frozenset()


class _Rule(NamedTuple):
    """What a value consists of.

    alternatives: for each way to write the value, the values that it must hold. optional: values that it may hold.
    """

    alternatives: list[list[_Value]]
    optional: list[_Value]


def check_ends(document: SchemaDocument) -> None:
    """Raise NotEnforceable if a value may begin that can never end."""
    if not _has_cycle(document, document.related):
        return  # no schema leads back to itself, so every value ends
    if _has_cycle(document, lambda schema: _together(document, schema)):
        raise NotEnforceable("in which a schema refers to itself, not to a part of its value")
    values = _Values(document)
    first = values.of([document.root])
    rules: dict[_Value, _Rule] = {}
    waiting = [first]
    while waiting:
        value = waiting.pop()
        if value in rules:
            continue
        if len(rules) == MAX_VALUES:
            raise NotEnforceable("in which too many choices hold together")
        rule = values.rule(value)
        rules[value] = rule
        waiting += [part for parts in rule.alternatives for part in parts]
        waiting += rule.optional
    endless = rules.keys() - _grown(rules, _can_end) - _grown(rules, _is_impossible)
    names = sorted(name for name in map(values.name, endless) if name is not None)
    if names:
        raise NotEnforceable(f"in which a value of {names[0]} must hold another one, without end")


def _has_cycle(document: SchemaDocument, following: Any) -> bool:
    graph = {}
    for schema in document.schemas():
        graph[id(schema)] = {id(part) for part in following(schema)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _together(document: SchemaDocument, schema: Mapping[str, Any]) -> list[Any]:
    """List the schemas that a value must satisfy because it satisfies this one."""
    return [*listed(schema, "allOf"), document.target(schema.get("$ref"))]


def _grown(
    rules: Mapping[_Value, _Rule], is_next: Callable[[_Rule, set[_Value]], bool]
) -> set[_Value]:
    """Grow a set of values from nothing: add values whose rules satisfy `is_next` with the set so far, while any do."""
    users = defaultdict(set)
    for value, rule in rules.items():
        for parts in rule.alternatives:
            for part in parts:
                users[part].add(value)
    grown: set[_Value] = set()
    waiting = set(rules)
    while waiting:
        value = waiting.pop()
        if value not in grown and is_next(rules[value], grown):
            grown.add(value)
            waiting |= users[value]
    return grown


def _can_end(rule: _Rule, ending: set[_Value]) -> bool:
    return any(ending.issuperset(parts) for parts in rule.alternatives)


def _is_impossible(rule: _Rule, impossible: set[_Value]) -> bool:
    return not any(impossible.isdisjoint(parts) for parts in rule.alternatives)


class _Values:
    """Makes the rules of a document's values."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._schemas: dict[int, Any] = {}
        references = {str(schema["$ref"]) for schema in document.schemas() if "$ref" in schema}
        self._names = {
            id(document.target(reference)): reference for reference in sorted(references)
        }

    def name(self, value: _Value) -> str | None:
        """Return the reference to one of a value's schemas; None if nothing refers to them."""
        return min(
            (self._names[schema_id] for schema_id in value.schemas & self._names.keys()),
            default=None,
        )

    def of(self, schemas: Iterable[Any], chosen: frozenset[int] = frozenset()) -> _Value:
        """Make the value for which all these schemas hold."""
        together = set[int]()
        waiting = list(schemas)
        while waiting:
            schema = waiting.pop()
            if schema is not False and not isinstance(schema, dict):
                continue
            if id(schema) in together:
                continue
            together.add(id(schema))
            self._schemas[id(schema)] = schema
            if schema:
                waiting += _together(self._document, schema)
        return _Value(frozenset(together), chosen)

    def rule(self, value: _Value) -> _Rule:
        """Return what a value consists of. Choices are resolved first, one list of them at a time."""
        schemas = [self._schemas[schema_id] for schema_id in value.schemas]
        if False in schemas:
            return _Rule([], [])  # no value satisfies the schemas
        for schema in schemas:
            for key in ("anyOf", "oneOf"):
                choices = listed(schema, key)
                if not choices or id(choices) in value.chosen:
                    continue
                chosen = value.chosen | {id(choices)}
                ways = []
                for choice in choices:
                    # A choice that refers back to this schema makes the same value again.
                    leads_back = id(schema) in self.of([choice]).schemas
                    way = value if leads_back else self.of([*schemas, choice], chosen)
                    ways.append([way])
                return _Rule(ways, [])
        if any("const" in schema or "enum" in schema for schema in schemas):
            return _Rule([[]], [])  # written as it stands, whatever it holds
        types = set(TYPES)
        for schema in schemas:
            types &= _types(schema)
        # A value that is no object and no array need hold no other values.
        alternatives: list[list[_Value]] = [[]] if types - {"object", "array"} else []
        optional: list[_Value] = []
        if "object" in types:
            self._add_object(schemas, alternatives, optional)
        if "array" in types:
            self._add_array(schemas, alternatives, optional)
        return _Rule(alternatives, optional)

    def _add_object(
        self, schemas: list[Any], alternatives: list[list[_Value]], optional: list[_Value]
    ) -> None:
        """Add what an object of these schemas must hold, and what else it may hold."""
        required = {name for schema in schemas for name in listed(schema, "required")}
        needed = [self._property(schemas, name) for name in required]
        declared = {name for schema in schemas for name in named(schema, "properties")}
        others = [self._property(schemas, name) for name in declared - required]
        others += [
            self.of([part])
            for schema in schemas
            for part in named(schema, "patternProperties").values()
        ]
        undeclared = [
            schema["additionalProperties"] for schema in schemas if "additionalProperties" in schema
        ]
        others.append(self.of(undeclared))
        optional += others
        if _largest(schemas, "minProperties") > len(required):
            # The object must hold at least one property beside the required ones.
            alternatives += [[*needed, other] for other in others]
        else:
            alternatives.append(needed)

    def _property(self, schemas: list[Any], name: str) -> _Value:
        parts: list[Any] = []
        for schema in schemas:
            properties = named(schema, "properties")
            patterns = named(schema, "patternProperties")
            if name in properties:
                parts.append(properties[name])
                continue
            matching = [part for pattern, part in patterns.items() if is_match(pattern, name)]
            if matching:
                parts += matching
            else:
                parts.append(schema.get("additionalProperties"))
        return self.of(parts)

    def _add_array(
        self, schemas: list[Any], alternatives: list[list[_Value]], optional: list[_Value]
    ) -> None:
        """Add what an array of these schemas must hold, and what else it may hold."""
        longest = max(len(_first_items(schema)) for schema in schemas) if schemas else 0
        # The item behind the longest list of first items stands for all further ones.
        items = [self._item(schemas, place) for place in range(longest + 1)]
        optional += items
        num_needed = _largest(schemas, "minItems")
        needed = [item for place, item in enumerate(items) if place < num_needed]
        alternatives.append(needed)

    def _item(self, schemas: list[Any], place: int) -> _Value:
        parts = []
        for schema in schemas:
            first = _first_items(schema)
            # In older schemas, `items` is the list of first items, and `additionalItems` holds for the others.
            key = "additionalItems" if isinstance(schema.get("items"), list) else "items"
            parts.append(first[place] if place < len(first) else schema.get(key))
        return self.of(parts)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows."""
    declared = schema.get("type", TYPES)
    types = {declared} if isinstance(declared, str) else set(declared)
    return types | {"integer"} if "number" in types else types


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of an array's first items."""
    return listed(schema, "prefixItems") or listed(schema, "items")


def _largest(schemas: Iterable[Mapping[str, Any]], key: str) -> float:
    values = [schema.get(key) for schema in schemas]
    return max((value for value in values if isinstance(value, int | float)), default=0)


def is_match(pattern: str, name: str) -> bool:
    """Whether a pattern of patternProperties matches a property's name."""
    try:
        return re.search(pattern, name) is not None
    except re.error:  # another dialect, or no pattern: llguidance reports it
        return False
