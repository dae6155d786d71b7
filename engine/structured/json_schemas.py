"""Finds what llguidance would misread in a JSON schema. It is rewritten so that llguidance enforces it, or refused.

llguidance reads numbers as floats, and bounds of integers as 64 bits. It ignores patternProperties for a declared
property, counts a key twice if it is repeated, and begins values that can never end.
"""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from fractions import Fraction
from typing import Any, TypeGuard

from engine.structured.endless_schemas import NotEnforceable, check_ends, is_match
from engine.structured.schema_parts import SchemaDocument, listed, walk

#: llguidance's options in a schema, which would change how it is read. To others it is a keyword without meaning.
OPTIONS = "x-guidance"

#: Integers up to here are exact as floats.
EXACT = 2**53
#: The largest float that is an integer of 64 bits.
LARGEST = 2**63 - 1024
#: The largest factor of multiples: llguidance finds remainders with 32 bits, digit by digit.
LARGEST_FACTOR = (2**32 - 1 - 9) // 10

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAYS = "((0[13578]|1[02])-31|(0[13-9]|1[0-2])-(29|30)|(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))"
#: The beginning of a date that exists. llguidance's own formats allow the year 0000 and February 29 in any year.
DATE = f"^({_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"


def enforceable(schema: Any) -> Any:
    """Return the schema in a form that llguidance enforces. Raises NotEnforceable."""
    schema = deepcopy(schema)
    document = SchemaDocument(schema)
    for part in document.schemas():
        part.pop(OPTIONS, None)
        _check_values(part)
        _check_factors(part, document)
        _write_bounds(part)
        _check_properties(part)
        _write_dates(part)
    check_ends(document)
    return schema


def strings_of(schema: Any) -> Iterator[str]:
    """Yield the strings that an answer may have to spell out: names of properties, and values of const and enum."""
    for part in SchemaDocument(schema).schemas():
        if isinstance(part.get("properties"), dict):
            yield from part["properties"]
        for value in _values(part):
            yield from _strings(value)


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
            if not isinstance(leaf, int) or abs(leaf) <= EXACT:
                continue
            if abs(leaf) > LARGEST or int(float(leaf)) != leaf:
                raise NotEnforceable(f"whose integer {leaf} would be rounded: write it as a string")


def _check_factors(schema: Mapping[str, Any], document: SchemaDocument) -> None:
    """Raise NotEnforceable for multiples that llguidance would get wrong."""
    factors = {
        abs(Fraction(repr(part["multipleOf"])))
        for part in _with_choices(schema, document)
        if _has_factor(part)
    }
    if not factors:
        return
    # Multiplied by this denominator, all factors are whole numbers.
    denominator = math.lcm(*(factor.denominator for factor in factors))
    whole_factors = [int(factor * denominator) for factor in factors]
    if math.lcm(*whole_factors) > LARGEST_FACTOR:
        raise NotEnforceable(f"whose multipleOf has too many digits: the most is {LARGEST_FACTOR}")


def _has_factor(schema: Mapping[str, Any]) -> bool:
    return _is_number(schema.get("multipleOf")) and math.isfinite(schema["multipleOf"])


def _with_choices(
    schema: Mapping[str, Any], document: SchemaDocument
) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and all schemas that may hold for the same value: its choices, and what it refers to."""

    def for_same_value(part: Mapping[str, Any]) -> list[Any]:
        choices = [choice for key in ("allOf", "anyOf", "oneOf") for choice in listed(part, key)]
        return [*choices, document.target(part.get("$ref"))]

    return walk([schema], for_same_value)


def _write_bounds(schema: dict[str, Any]) -> None:
    """Replace a bound that is no float by the next float inside it, so that no answer breaks the schema's bound.

    An exclusive bound is replaced by an inclusive bound of the next integer: llguidance would add 1 to a float.
    """
    for sign, key, exclusive in (
        (-1, "minimum", "exclusiveMinimum"),
        (1, "maximum", "exclusiveMaximum"),
    ):
        for name in (key, exclusive):
            bound = schema.get(name)
            if not _is_number(bound) or abs(bound) < EXACT:
                continue
            # Multiplied by the sign, a minimum is a maximum too.
            most = sign * _whole(bound)
            if name == exclusive:
                most -= 1
            most = min(most, LARGEST)
            if most < -LARGEST:
                raise NotEnforceable(f"whose {name} leaves no integer of 64 bits")
            nearest = float(most)
            if nearest > most:
                nearest = math.nextafter(nearest, -math.inf)
            inner: int | float = int(nearest)
            del schema[name]
            other = schema.get(key)
            if _is_number(other):
                inner = min(inner, sign * other)
            schema[key] = sign * inner


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(bound: float) -> int:
    """Return a bound of at least EXACT as an int. One that is far beyond 64 bits, such as infinity, is cut to 2**70."""
    return int(max(min(bound, 2**70), -(2**70)))


def _check_properties(schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties")
    patterns = schema.get("patternProperties")
    if isinstance(properties, dict) and isinstance(patterns, dict):
        for name in properties:
            for pattern in patterns:
                if is_match(pattern, name):
                    raise NotEnforceable(
                        f"whose property {name!r} is one of patternProperties {pattern!r} too"
                    )
    least = schema.get("minProperties")
    required = schema.get("required")
    num_required = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1:
        raise NotEnforceable(
            "whose minProperties would be met by one key that is written more than once: require its properties"
        )


def _write_dates(schema: dict[str, Any]) -> None:
    """Allow only dates that exist in the calendar."""
    if schema.get("format") not in ("date", "date-time"):
        return
    if "pattern" not in schema:
        schema["pattern"] = DATE
    elif schema["pattern"] != DATE:
        conditions = schema.get("allOf", [])
        schema["allOf"] = [*conditions, {"type": "string", "pattern": DATE}]
