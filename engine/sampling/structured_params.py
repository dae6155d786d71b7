"""StructuredOutputsParams: the form that a completion's text must have."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling.parameter_values import brief, check_switch, check_unicode

MAX_BYTES = 1 << 20  # of a schema, a pattern, a grammar, or all choices
NAME = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Set one of these fields, each as in vLLM, and leave the others None. Raises InvalidSampling.

    json: a JSON schema, as an object, as its text, or as a pydantic model's class; kept as text.
    regex: a pattern for all of the text. choice: the allowed texts.
    grammar: a context-free grammar, in Lark's notation or in GBNF's. json_object: True for any JSON object.
    allow_whitespace: whether JSON may have blanks and line breaks between its parts. By default it is compact. A model
    that likes blanks could fill all of max_tokens with them.
    """

    json: Mapping[str, Any] | bool | str | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    allow_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidSampling(
                f"{NAME}.json_object must be true or false", brief(self.json_object)
            )
        check_switch(f"{NAME}.{WHITESPACE}", self.allow_whitespace)
        if not self.json_object:  # False asks for nothing, as None does
            object.__setattr__(self, "json_object", None)
        kinds = [name for name in NAMES if getattr(self, name) is not None]
        if len(kinds) != 1:
            got = " and ".join(kinds) or "none"
            raise InvalidSampling(f"{NAME} must have one of {', '.join(NAMES)}", got)
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        elif self.json_object is None:  # a regex or a grammar
            _check_text(kinds[0], getattr(self, kinds[0]))

    @property
    def kind(self) -> str:
        """The name of the field in use."""
        return next(name for name in NAMES if getattr(self, name) is not None)


WHITESPACE = "allow_whitespace"
#: The fields of which one is set.
NAMES = tuple(
    option.name for option in fields(StructuredOutputsParams) if option.name != WHITESPACE
)


def json_schema_of(value: Any) -> Any:
    """Return the JSON schema of a pydantic model's class, and any other value as it is.

    Objects may have only the keys that their class names, unless the class says `extra="allow"`. With other keys
    allowed, a language model may add keys without end.
    """
    make_schema = getattr(value, "model_json_schema", None)
    if isinstance(value, type) and callable(make_schema):
        return _closed(make_schema())
    return value


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no keys beside those that they name."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED_SCHEMAS:
            closed[name] = {key: _closed(inner) for key, inner in value.items()}
        else:
            closed[name] = value if name in _DATA else _closed(value)
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


#: Keywords that hold schemas by names of the class.
_NAMED_SCHEMAS = ("properties", "$defs")
#: Keywords that hold values, which may look like schemas.
_DATA = ("const", "default", "enum", "example", "examples")


def structured_outputs(value: object) -> StructuredOutputsParams | None:
    """Return StructuredOutputsParams for a mapping of its fields or for a pydantic model's class.

    None and StructuredOutputsParams are returned as they are. Raises InvalidSampling.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, type):
        value = {"json": value}
    if not isinstance(value, Mapping):
        raise InvalidSampling(
            f"{NAME} must be an object such as {{'regex': '[0-9]+'}}", brief(value)
        )
    for name in value:
        if name not in NAMES and name != WHITESPACE:
            raise InvalidSampling(
                f"{NAME} has a name that is none of {', '.join((*NAMES, WHITESPACE))}", brief(name)
            )
    return StructuredOutputsParams(**value)


def _schema(schema: object) -> str:
    """Write the schema as compact JSON; the order of its keys is that of the text's properties."""
    schema = json_schema_of(schema)
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
    size = len(text.encode())
    if size > MAX_BYTES:
        raise InvalidSampling(
            f"{NAME}.{name} has {size} bytes, more than {MAX_BYTES}: make it smaller"
        )
