"""StructuredOutputsParams: the form that a completion's text must have."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.parameter_values import brief, check_unicode

MAX_BYTES = 1 << 20  # of a schema, a pattern, a grammar, or all choices
NAME = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Set one of these fields, each as in vLLM, and leave the others None. Raises InvalidSampling.

    json: a JSON schema, as an object or as its text; kept as text. regex: a pattern for all of the text.
    choice: the allowed texts. grammar: a context-free grammar, in Lark's notation or in GBNF's.
    json_object: True for any JSON object.
    """

    json: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidSampling(
                f"{NAME}.json_object must be true or false", brief(self.json_object)
            )
        if not self.json_object:
            object.__setattr__(self, "json_object", None)
        given = [name for name in NAMES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidSampling(f"{NAME} must have one of {', '.join(NAMES)}", found)
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        elif self.json_object is None:
            _check_text(given[0], getattr(self, given[0]))

    @property
    def kind(self) -> str:
        """The name of the field in use."""
        return next(name for name in NAMES if getattr(self, name) is not None)


NAMES = tuple(each.name for each in fields(StructuredOutputsParams))


def structured_outputs(value: object) -> StructuredOutputsParams | None:
    """Read an object of the class, or the same as a mapping. Raises InvalidSampling."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidSampling(
            f"{NAME} must be an object such as {{'regex': '[0-9]+'}}", brief(value)
        )
    for name in value:
        if name not in NAMES:
            raise InvalidSampling(
                f"{NAME} has a name that is none of {', '.join(NAMES)}", brief(name)
            )
    return StructuredOutputsParams(**value)


def _schema(schema: object) -> str:
    """Write the schema as compact JSON; the order of its keys is that of the text's properties."""
    if isinstance(schema, str):
        _check_text("json", schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidSampling(f"{NAME}.json is a text that is no JSON", brief(schema)) from None
    if not isinstance(schema, Mapping | bool):
        raise InvalidSampling(f"{NAME}.json must be a JSON schema, an object", brief(schema))
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSampling(f"{NAME}.json cannot be written as JSON", str(error)) from None
    _check_text("json", text)
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple) or not choices:
        raise InvalidSampling(
            f"{NAME}.choice must be a list of strings, one at least", brief(choices)
        )
    for text in choices:
        _check_text("choice", text)
    if sum(map(len, choices)) > MAX_BYTES:
        raise InvalidSampling(f"{NAME}.choice has more than {MAX_BYTES} characters in all")
    return tuple(dict.fromkeys(choices))


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidSampling(f"{NAME}.{name} must be text", brief(text))
    check_unicode(f"{NAME}.{name}", text)
    if (size := len(text.encode())) > MAX_BYTES:
        raise InvalidSampling(
            f"{NAME}.{name} has {size} bytes, more than {MAX_BYTES}: make it smaller"
        )
