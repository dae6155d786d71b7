"""SamplingParams: how to choose tokens for one request and when to stop.

Its fields are the table of sampling values. A row gives a name, a default, which changes nothing, and the
least and the most the value may be, ends included. A `column` also has the dtype of the array that carries it
to the sampler: slots, batches and warm-up take the columns from here (`sampling_batch`), so that a new one is
a row here and a function in the sampler.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from engine.errors import InvalidSampling

MAX_COUNT = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_NAME_CHARS = 64
MAX_LOGPROBS = 20  # the default of vLLM's max_logprobs
WHOLE_VOCABULARY = -1

# Names of vLLM's and OpenAI's that callers may know and that are not built: the error says so.
NOT_BUILT = frozenset(
    (
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "detokenize",
        "echo",
        "flat_logprobs",
        "frequency_penalty",
        "guided_decoding",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logits_processors",
        "presence_penalty",
        "repetition_penalty",
        "response_format",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream",
        "structured_outputs",
        "suffix",
        "top_logprobs",
        "truncate_prompt_tokens",
        "use_beam_search",
    )
)


@dataclass(frozen=True)
class Range:
    """What an integer or a number may be, ends included."""

    low: int
    high: int
    integer: bool

    def check(self, name: str, value: object) -> None:
        """Raise InvalidSampling unless the value of `name` is of its kind and in range."""
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            kind = "an integer" if self.integer else "a number"
            raise InvalidSampling(f"{name} must be {kind}{_hint(value)}", shown(value))
        if not self.low <= value <= self.high:  # not a number is between no two
            raise InvalidSampling(f"{name} must be between {self.low} and {self.high}", shown(value))


TOKEN_ID = Range(0, MAX_COUNT, integer=True)


def integer(default: int | None, low: int, high: int) -> Any:
    """A field for an integer."""
    return field(default=default, metadata={"range": Range(low, high, integer=True)})


def column(default: float, low: int, high: int, dtype: str) -> Any:
    """A field that the sampler reads for each row. dtype: numpy's name; it holds every value in range."""
    is_integer = dtype.startswith("int")
    return field(default=default, metadata={"range": Range(low, high, is_integer), "dtype": dtype})


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's and OpenAI's. Raises InvalidSampling for a value that cannot be.

    max_tokens: new tokens at most.
    temperature: 0 is greedy: the highest logit, the lowest token id among equals.
    top_p, top_k, min_p: cuts of the distribution, applied min_p, top_k, top_p; top_k of 0 or -1 is off.
    seed: with the position and the sample's index it fixes every choice; None draws a fresh seed.
    stop: text that ends the completion and is cut from it; one string or several.
    stop_token_ids: token ids that end the completion, beside the model's own end tokens.
    ignore_eos: go on past the model's end tokens.
    min_tokens: new tokens before any end token, stop token or stop string may end the completion.
    n: independent samples of the request.
    logprobs: give each new token's log probability, and those of so many of the most likely ones: 0 to
        MAX_LOGPROBS, or WHOLE_VOCABULARY; None gives none. They are of the model's own distribution, before
        temperature and whatever else changes it.
    prompt_logprobs: the same for each token of the prompt but the first. Of these the prefix cache spares no
        computing.
    """

    max_tokens: int = integer(256, 1, MAX_COUNT)
    temperature: float = column(1.0, 0, 1_000_000, "float32")
    top_p: float = column(1.0, 0, 1, "float32")
    top_k: int = column(-1, -1, MAX_COUNT, "int32")
    min_p: float = column(0.0, 0, 1, "float32")
    seed: int | None = integer(None, -(2**63), 2**64 - 1)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = integer(0, 0, MAX_COUNT)
    n: int = integer(1, 1, 128)
    logprobs: int | None = integer(None, WHOLE_VOCABULARY, MAX_LOGPROBS)
    prompt_logprobs: int | None = integer(None, WHOLE_VOCABULARY, MAX_LOGPROBS)

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                allowed.check(name, value)
        if self.top_p == 0:
            raise InvalidSampling("top_p must be above 0; for the likeliest token alone set temperature=0")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidSampling("ignore_eos must be true or false", shown(self.ignore_eos))
        if self.min_tokens > self.max_tokens:
            raise InvalidSampling(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Build from names and values that came from outside, such as a job's keyword arguments.

        None is any name's default. Raises InvalidSampling for a name that is unknown or not built yet; none
        is ever ignored.
        """
        for name in mapping:
            if name not in _NAMES:
                problem = "is not built yet" if name in NOT_BUILT else "is no sampling parameter"
                raise InvalidSampling(f"{shown(name)} {problem}; {_names_to_use(name, sorted(_NAMES))}")
        if None in mapping.values():
            mapping = {name: value for name, value in mapping.items() if value is not None}
        types = tuple(map(type, mapping.values()))
        if _PLAIN.issuperset(types):
            return _remembered(tuple(mapping.items()), types)
        return cls(**mapping)


def check_params(params: object, vocab_size: int) -> None:
    """Raise InvalidSampling unless params are SamplingParams that fit a vocabulary of that size."""
    if not isinstance(params, SamplingParams):
        raise InvalidSampling(f"params must be SamplingParams, got {type(params).__name__}")
    for token_id in params.stop_token_ids:
        if token_id >= vocab_size:
            raise InvalidSampling(f"stop token id {token_id} is outside the vocabulary of {vocab_size}")


_NAMES = frozenset(each.name for each in fields(SamplingParams))
RANGES: dict[str, Range] = {
    each.name: each.metadata["range"] for each in fields(SamplingParams) if "range" in each.metadata
}
OPTIONAL = frozenset(name for name in RANGES if SamplingParams.__dataclass_fields__[name].default is None)
#: Name and numpy's dtype of what the sampler reads for each row.
COLUMNS: dict[str, str] = {
    each.name: each.metadata["dtype"] for each in fields(SamplingParams) if "dtype" in each.metadata
}
_PLAIN = frozenset((int, float, bool, str, type(None)))


@lru_cache(maxsize=256)
def _remembered(items: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> SamplingParams:
    """Thousands of jobs have the same few values. types: 1, 1.0 and True are one key, but not all allowed."""
    return SamplingParams(**dict(items))


def _names_to_use(name: object, accepted: Sequence[str]) -> str:
    """Name the parameter that a misspelt one is nearest to, or all of them."""
    near = get_close_matches(str(name)[:MAX_NAME_CHARS].lower(), accepted, n=1)
    hint = f"did you mean {near[0]}? " if near and name not in NOT_BUILT else ""
    return f"{hint}accepted are {', '.join(accepted)}"


def shown(value: object) -> str:
    """The value as Python writes it, in short: it may be as long as a prompt."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"one of type {type(value).__name__} with a number too long to show"


def _hint(value: object) -> str:
    return " and no text: write it without quotes" if isinstance(value, str) else ""


def _stop_strings(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
        raise InvalidSampling("stop must be a string or a list of strings", shown(stop))
    if len(stop) > MAX_STOPS:
        raise InvalidSampling(f"stop holds {len(stop)} strings; at most {MAX_STOPS} are allowed")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidSampling(
                f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = "a stop string is no valid Unicode: it holds half of a surrogate pair"
            raise InvalidSampling(problem) from None
    return tuple(stop)


def _stop_token_ids(token_ids: object) -> tuple[int, ...]:
    if not isinstance(token_ids, (list, tuple)):
        raise InvalidSampling("stop_token_ids must be a list of token ids", shown(token_ids))
    if len(token_ids) > MAX_STOPS:
        raise InvalidSampling(f"stop_token_ids holds {len(token_ids)} ids; at most {MAX_STOPS} are allowed")
    for token_id in token_ids:
        TOKEN_ID.check("stop_token_ids", token_id)
    return tuple(token_ids)
