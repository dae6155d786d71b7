"""Checks of single sampling values: ranges, lists, and the form that a text must have."""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from engine.errors import InvalidSampling

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """What an integer or a number may be, ends included."""

    low: float
    high: float
    integer: bool

    def check(self, name: str, value: object) -> None:
        """Raise InvalidSampling unless the value of `name` is of its kind and in range."""
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            kind = "an integer" if self.integer else "a number"
            raise InvalidSampling(f"{name} must be {kind}{_hint(value)}", brief(value))
        if not self.low <= value <= self.high:  # not a number is between no two
            raise InvalidSampling(f"{name} must be between {self.low} and {self.high}", brief(value))


TOKEN_ID = Range(0, MAX_COUNT, integer=True)


def check_switch(name: str, value: object) -> None:
    """Raise InvalidSampling unless the value of `name` is true or false."""
    if not isinstance(value, bool):
        raise InvalidSampling(f"{name} must be true or false", brief(value))


def brief(value: object) -> str:
    """The value as Python writes it, in short: it may be as long as a prompt."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"one of type {type(value).__name__} with a number too long to show"


def _hint(value: object) -> str:
    return " and no text: write it without quotes" if isinstance(value, str) else ""


MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 1024
MAX_MARK_CHARS = 64
MAX_DIGITS = 10  # of a token id
BIAS = Range(-100, 100, integer=False)


class TokenBias(Mapping[int, float]):
    """What to add to the logits of some tokens: token id to number, ascending by id. Nobody changes it."""

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases = {token_id: biases[token_id] for token_id in sorted(biases)}

    def __getitem__(self, token_id: int) -> float:
        return self._biases[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(tuple(self._biases.items()))

    def __repr__(self) -> str:
        return f"TokenBias({self._biases!r})"


def stop_strings(stop: object) -> tuple[str, ...]:
    """One string or several. Raises InvalidSampling."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
        raise InvalidSampling("stop must be a string or a list of strings", brief(stop))
    return _texts(stop, "stop", "a stop string", MAX_STOPS)


def reasoning_marks(marks: object) -> tuple[str, ...]:
    """None, or two. Raises InvalidSampling."""
    if not isinstance(marks, (list, tuple)) or not all(isinstance(text, str) for text in marks):
        raise InvalidSampling("reasoning_marks must be a list of two texts", brief(marks))
    if marks and (len(marks) != 2 or marks[0] == marks[1]):
        raise InvalidSampling("reasoning_marks must be two texts that differ", brief(marks))
    for text in marks:
        if not 0 < len(text) <= MAX_MARK_CHARS or text != text.strip() or "\ufffd" in text:
            raise InvalidSampling(
                f"a reasoning mark must have 1 to {MAX_MARK_CHARS} characters, without blanks around them",
                brief(text),
            )
    return _texts(marks, "reasoning_marks", "a reasoning mark", 2)


def stop_token_ids(token_ids: object) -> tuple[int, ...]:
    """Check stop token ids and return them in their order. Raises InvalidSampling."""
    if not isinstance(token_ids, (list, tuple)):
        raise InvalidSampling("stop_token_ids must be a list of token ids", brief(token_ids))
    if len(token_ids) > MAX_STOPS:
        raise InvalidSampling(f"stop_token_ids holds {len(token_ids)} ids; at most {MAX_STOPS} are allowed")
    for token_id in token_ids:
        TOKEN_ID.check("stop_token_ids", token_id)
    return tuple(token_ids)


def bad_words(words: object) -> tuple[str, ...]:
    """Each once; none for None. Raises InvalidSampling."""
    if words is None:
        return ()
    if not isinstance(words, (list, tuple)) or not all(isinstance(text, str) for text in words):
        raise InvalidSampling("bad_words must be a list of strings", brief(words))
    return tuple(dict.fromkeys(_texts(words, "bad_words", "a bad word", MAX_BAD_WORDS)))


def allowed_token_ids(token_ids: object) -> tuple[int, ...] | None:
    """Ascending, each once; None for None. Raises InvalidSampling."""
    if token_ids is None:
        return None
    if not isinstance(token_ids, (list, tuple, range)):
        raise InvalidSampling("allowed_token_ids must be a list of token ids", brief(token_ids))
    if not token_ids:
        raise InvalidSampling("allowed_token_ids is empty, so that no token could be chosen; leave it out")
    if set(map(type, token_ids)) != {int}:
        for token_id in token_ids:
            TOKEN_ID.check("allowed_token_ids", token_id)
    return _ascending(tuple(token_ids))


@lru_cache(maxsize=16)  # rows of a run name the same ids again and again, perhaps all of a vocabulary
def _ascending(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    ordered = tuple(sorted(set(token_ids)))
    for token_id in (ordered[0], ordered[-1]):
        TOKEN_ID.check("allowed_token_ids", token_id)
    return ordered


def logit_bias(biases: object) -> TokenBias | None:
    """Token ids, also as the text that they are as JSON's keys, to numbers; None for None or for none.

    Raises InvalidSampling.
    """
    if biases is None or isinstance(biases, TokenBias):
        return biases or None
    if not isinstance(biases, Mapping):
        raise InvalidSampling("logit_bias must be a mapping of token ids to numbers", brief(biases))
    checked: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = _token_id(key)
        if token_id in checked:
            raise InvalidSampling(f"logit_bias names token id {token_id} twice")
        BIAS.check("a bias of logit_bias", bias)
        checked[token_id] = float(bias)
    return TokenBias(checked) if checked else None


def _token_id(key: object) -> int:
    """A key of logit_bias: an integer, or digits."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS:
        key = int(key)
    if type(key) is not int:
        raise InvalidSampling("a key of logit_bias must be a token id", brief(key))
    TOKEN_ID.check("a key of logit_bias", key)
    return key


def _texts(texts: list[str] | tuple[str, ...], name: str, what: str, most: int) -> tuple[str, ...]:
    if len(texts) > most:
        raise InvalidSampling(f"{name} holds {len(texts)} strings; at most {most} are allowed")
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidSampling(f"{what} must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = f"{what} is no valid Unicode: it holds half of a surrogate pair"
            raise InvalidSampling(problem) from None
    return tuple(texts)


MAX_BYTES = 1 << 20  # of a schema, a pattern, a grammar, or all choices
NAME = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of the following, each as vLLM has it; the others stay None. Raises InvalidSampling.

    json: a JSON schema, as an object or as its text; kept as text. regex: a pattern for all of the text.
    choice: texts of which it is one. grammar: a context-free grammar, in Lark's notation or in GBNF's.
    json_object: True for any JSON object.
    """

    json: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidSampling(f"{NAME}.json_object must be true or false", brief(self.json_object))
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
        """Which of them it is."""
        return next(name for name in NAMES if getattr(self, name) is not None)


NAMES = tuple(each.name for each in fields(StructuredOutputsParams))


def structured_outputs(value: object) -> StructuredOutputsParams | None:
    """What a request says: an object of the class, or the same as a mapping. Raises InvalidSampling."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise InvalidSampling(f"{NAME} must be an object such as {{'regex': '[0-9]+'}}", brief(value))
    for name in value:
        if name not in NAMES:
            raise InvalidSampling(f"{NAME} has a name that is none of {', '.join(NAMES)}", brief(name))
    return StructuredOutputsParams(**value)


def _schema(schema: object) -> str:
    """The schema as compact JSON, its keys in their order, which is that of the properties in the text."""
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
        raise InvalidSampling(f"{NAME}.choice must be a list of strings, one at least", brief(choices))
    for text in choices:
        _check_text("choice", text)
    if sum(map(len, choices)) > MAX_BYTES:
        raise InvalidSampling(f"{NAME}.choice has more than {MAX_BYTES} characters in all")
    return tuple(dict.fromkeys(choices))


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidSampling(f"{NAME}.{name} must be text", brief(text))
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        problem = f"{NAME}.{name} is no valid Unicode: it holds half of a surrogate pair"
        raise InvalidSampling(problem) from None
    if size > MAX_BYTES:
        raise InvalidSampling(f"{NAME}.{name} has {size} bytes, more than {MAX_BYTES}: make it smaller")
