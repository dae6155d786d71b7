"""Checks of single sampling values: ranges and lists. Each raises InvalidSampling."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidSampling

MAX_COUNT = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 1024
MAX_MARK_CHARS = 64
MAX_DIGITS = 10  # of a token id


@dataclass(frozen=True)
class Range:
    """The range of an integer or a number, ends included."""

    low: float
    high: float
    integer: bool

    def check(self, name: str, value: object) -> None:
        """Raise InvalidSampling unless the value of `name` is a number of the right kind and in range."""
        kinds = (int,) if self.integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "an integer" if self.integer else "a number"
            hint = " and no text: write it without quotes" if isinstance(value, str) else ""
            raise InvalidSampling(f"{name} must be {kind}{hint}", brief(value))
        if not self.low <= value <= self.high:  # NaN is in no range
            raise InvalidSampling(
                f"{name} must be between {self.low} and {self.high}", brief(value)
            )


TOKEN_ID = Range(0, MAX_COUNT, integer=True)
BIAS = Range(-100, 100, integer=False)


def brief(value: object) -> str:
    """Write the value as Python does, but cut short: it may be as long as a prompt."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"one of type {type(value).__name__} with a number too long to show"


def check_switch(name: str, value: object) -> None:
    """Raise InvalidSampling unless the value of `name` is true or false."""
    if not isinstance(value, bool):
        raise InvalidSampling(f"{name} must be true or false", brief(value))


def check_adapter_name(name: object) -> None:
    """Raise InvalidSampling unless an adapter's name is a text, or None for no adapter."""
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidSampling("adapter must be the name of an adapter", brief(name))


def check_unicode(what: str, text: str) -> None:
    """Raise InvalidSampling for a text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidSampling(
            f"{what} is no valid Unicode: it holds half of a surrogate pair"
        ) from None


class TokenBias(dict[int, float]):
    """Numbers to add to the logits of some tokens, ascending by token id; immutable."""

    def __hash__(self) -> int:  # type: ignore[override]  # dict sets __hash__ to None
        return hash(tuple(self.items()))


def stop_strings(stop: object) -> tuple[str, ...]:
    """Return one string or several as a tuple."""
    if isinstance(stop, str):
        stop = (stop,)
    return _texts(stop, "stop", "a stop string", MAX_STOPS, kind="a string or a list of strings")


def reasoning_marks(marks: object) -> tuple[str, ...]:
    """Check the two texts around a reasoning, and return them; () if there are none."""
    texts = _texts(marks, "reasoning_marks", "a reasoning mark", 2, kind="a list of two texts")
    if texts and (len(texts) != 2 or texts[0] == texts[1]):
        raise InvalidSampling("reasoning_marks must be two texts that differ", brief(marks))
    for text in texts:
        if len(text) > MAX_MARK_CHARS or text != text.strip() or "\ufffd" in text:
            raise InvalidSampling(
                f"a reasoning mark must have 1 to {MAX_MARK_CHARS} characters, without blanks around them",
                brief(text),
            )
    return texts


def tools(values: object) -> tuple[Mapping[str, Any], ...]:
    """Return the tools in the order given. Raises InvalidSampling unless each has a function with a name."""
    if not isinstance(values, (list, tuple)):
        raise InvalidSampling("tools must be a list of functions", brief(values))
    for tool in values:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidSampling("a tool must have a function with a name", brief(tool))
    return tuple(values)


def tool_choice(value: object) -> object:
    """Check a choice that forces a call of any tool or of a named one, and return it; None forces nothing."""
    if value is None or value == "required":
        return value
    function = (
        value.get("function")
        if isinstance(value, Mapping) and value.get("type") == "function"
        else None
    )
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        wanted = "'required' or {'type': 'function', 'function': {'name': ...}}"
        raise InvalidSampling(f"tool_choice must be {wanted}", brief(value))
    return {"type": "function", "function": {"name": function["name"]}}


def stop_token_ids(token_ids: object) -> tuple[int, ...]:
    """Check stop token ids, and return them in their order."""
    if not isinstance(token_ids, (list, tuple)):
        raise InvalidSampling("stop_token_ids must be a list of token ids", brief(token_ids))
    if len(token_ids) > MAX_STOPS:
        raise InvalidSampling(
            f"stop_token_ids holds {len(token_ids)} ids; at most {MAX_STOPS} are allowed"
        )
    for token_id in token_ids:
        TOKEN_ID.check("stop_token_ids", token_id)
    return tuple(token_ids)


def bad_words(words: object) -> tuple[str, ...]:
    """Check bad words, and return each of them once. None stands for no words."""
    if words is None:
        return ()
    return tuple(dict.fromkeys(_texts(words, "bad_words", "a bad word", MAX_BAD_WORDS)))


def allowed_token_ids(token_ids: object) -> tuple[int, ...] | None:
    """Check allowed token ids, and return them in ascending order, each once; None if all are allowed."""
    if token_ids is None:
        return None
    if not isinstance(token_ids, (list, tuple, range)):
        raise InvalidSampling("allowed_token_ids must be a list of token ids", brief(token_ids))
    if not token_ids:
        raise InvalidSampling(
            "allowed_token_ids is empty, so that no token could be chosen; leave it out"
        )
    for token_id in token_ids:
        # There may be 100,000 of them, so `check` is called only for a wrong one.
        if type(token_id) is not int or not 0 <= token_id <= MAX_COUNT:
            TOKEN_ID.check("allowed_token_ids", token_id)
    return tuple(sorted(set(token_ids)))


def logit_bias(biases: object) -> TokenBias | None:
    """Check and return biases by token id; None if there are none. A token id may be text, as JSON's keys are."""
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
    return TokenBias(sorted(checked.items())) if checked else None


def _token_id(key: object) -> int:
    """Return the token id that a key of logit_bias gives, as an integer or as digits."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS:
        key = int(key)
    if type(key) is not int:
        raise InvalidSampling("a key of logit_bias must be a token id", brief(key))
    TOKEN_ID.check("a key of logit_bias", key)
    return key


def _texts(
    texts: object, name: str, what: str, most: int, *, kind: str = "a list of strings"
) -> tuple[str, ...]:
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise InvalidSampling(f"{name} must be {kind}", brief(texts))
    if len(texts) > most:
        raise InvalidSampling(f"{name} holds {len(texts)} strings; at most {most} are allowed")
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidSampling(
                f"{what} must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
            )
        check_unicode(what, text)
    return tuple(texts)
