"""Finds what llguidance would misread in a JSON schema, and rewrites it so that it holds, or refuses it.

llguidance reads numbers as floats, and bounds of integers as 64 bits. It ignores patternProperties for a declared
property, counts a repeated key twice, and begins a value that can never end.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems")
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

#: Integers up to here are exact as floats.
EXACT = 2**53
#: The largest float that is an integer of 64 bits.
LARGEST = 2**63 - 1024

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAYS = "((0[13578]|1[02])-31|(0[13-9]|1[0-2])-(29|30)|(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))"
#: The beginning of a date that exists. llguidance's own formats allow the year 0000 and February 29 in any year.
DATE = f"^({_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"


class NotEnforceable(ValueError):
    """Raised with the reason when llguidance would misread a schema."""


def enforceable(schema: Any) -> Any:
    """Return the schema in a form that llguidance enforces. Raises NotEnforceable."""
    schema = deepcopy(schema)
    for part in schemas_in(schema):
        _check_values(part)
        _write_bounds(part)
        _check_properties(part)
        _write_dates(part)
    _check_ends(schema)
    return schema


def schemas_in(schema: Any, root: Any = None) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it. root: of references; None: the schema; False: follow none."""
    root = schema if root is None else root
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += _parts(part)
        if root is not False:
            waiting.append(_target(root, part.get("$ref")))


def strings_of(schema: Any) -> Iterator[str]:
    """Yield the strings that an answer may have to spell out: names of properties, and values of const and enum."""
    for part in schemas_in(schema):
        if isinstance(part.get("properties"), dict):
            yield from part["properties"]
        for value in _values(part):
            yield from _strings(value)


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    """List the schemas directly inside a schema."""
    parts = [schema[key] for key in ONE if key in schema]
    for key in MANY:
        if isinstance(schema.get(key), list):
            parts += schema[key]
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            parts += schema[key].values()
    return parts


def _target(root: Any, reference: object) -> Any:
    """Return the schema that a reference points to; None if it is not in this document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    part = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """List the values of const and enum."""
    values = [schema["const"]] if "const" in schema else []
    return values + (schema["enum"] if isinstance(schema.get("enum"), list) else [])


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the innermost values of a value: those that hold no others."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for part in value:
        yield from _leaves(part)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
    elif isinstance(value, dict):
        yield from value
        yield from _strings(list(value.values()))


def _check_values(schema: Mapping[str, Any]) -> None:
    for value in _values(schema):
        for leaf in _leaves(value):
            if isinstance(leaf, int) and abs(leaf) > EXACT and (abs(leaf) > LARGEST or int(float(leaf)) != leaf):
                raise NotEnforceable(f"whose integer {leaf} would be rounded: write it as a string")


def _write_bounds(schema: dict[str, Any]) -> None:
    """Replace a bound that is no float by the next float inside it, so that no answer breaks the schema's bound."""
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = schema.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) <= EXACT:
            continue
        sign = 1 if key.lower().endswith("maximum") else -1
        most = min(sign * bound, LARGEST)  # with the sign, a minimum is a maximum too
        if most < -LARGEST:
            raise NotEnforceable(f"whose {key} leaves no integer of 64 bits")
        nearest = float(most)
        inner = nearest if nearest <= most else math.nextafter(nearest, -math.inf)
        schema[key] = sign * int(inner)


def _check_properties(schema: Mapping[str, Any]) -> None:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, dict) and isinstance(patterns, dict):
        for name in properties:
            for pattern in patterns:
                if _meets(pattern, name):
                    raise NotEnforceable(f"whose property {name!r} is one of patternProperties {pattern!r} too")
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1:
        raise NotEnforceable("whose minProperties one key, written more than once, would meet: require its properties")


def _meets(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # another dialect, or no pattern: llguidance reports it
        return False


def _write_dates(schema: dict[str, Any]) -> None:
    """Allow only dates that exist in the calendar."""
    if schema.get("format") not in ("date", "date-time"):
        return
    if "pattern" not in schema:
        schema["pattern"] = DATE
    elif schema["pattern"] != DATE:
        others = schema.get("allOf", [])
        schema["allOf"] = [*others, {"type": "string", "pattern": DATE}]


def _check_ends(root: Any) -> None:
    """Raise NotEnforceable if a value of some schema would have to hold another value of it, without end."""
    references = {part["$ref"] for part in schemas_in(root) if isinstance(part.get("$ref"), str)}
    targets = {reference: target for reference in references if (target := _target(root, reference)) is not None}
    users: defaultdict[str, list[str]] = defaultdict(list)
    for reference, target in targets.items():
        for part in schemas_in(target, root=False):
            users[str(part.get("$ref"))].append(reference)
    ending: set[str] = references - targets.keys()
    waiting = list(targets)
    while waiting:
        reference = waiting.pop()
        if reference not in ending and _can_end(targets[reference], ending):
            ending.add(reference)
            waiting += users[reference]
    for reference in sorted(targets.keys() - ending):
        raise NotEnforceable(f"in which a value of {reference} must hold another one, without end")


def _can_end(schema: Any, ending: set[str]) -> bool:
    """Whether some value of a schema can end. ending: references to schemas already known to have one."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if not all(_can_end(part, ending) for part in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if schema.get(key) and not any(_can_end(part, ending) for part in schema[key]):
            return False
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties", {})
        needed = [properties[name] for name in schema.get("required", ()) if name in properties]
        return all(_can_end(part, ending) for part in needed)
    if schema.get("type") in ("array", ["array"]):
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed = [*first[:least], *([schema["items"]] if least > len(first) and "items" in schema else [])]
        return all(_can_end(part, ending) for part in needed)
    return True
