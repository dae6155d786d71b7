"""What is kept of answers, and of prompts under way, so that another execution goes on where one was: as JSON."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from jobs.context.answers import Answer


@dataclass(frozen=True, slots=True)
class KeptCompletion:
    """What is kept of a completion; its other values are None."""

    index: int
    token_ids: Sequence[int]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None
    reasoning: str | None
    num_continued: int = 0

    def __getattr__(self, name: str) -> None:
        if name not in _NOT_KEPT:
            raise AttributeError(name)


_NOT_KEPT = ("logprobs", "prompt_logprobs", "prompt_text", "prompt_tokens", "embedding", "loglikelihoods")

_KEPT_TYPES = (int, str, str, str, int, int, str | None, str | None)


@dataclass(frozen=True)
class UnderWay:
    """How far a prompt was: what its requests got, in that order, and the tokens so far of those that wait.

    delivered: place of a request among those of the prompt, and its completions. so_far: by place and sample.
    num_tokens: generated for what was delivered.
    """

    delivered: Sequence[tuple[int, Sequence[Any]]] = ()
    so_far: Mapping[int, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def length(self) -> tuple[int, int]:
        """Return how far it is, for a comparison."""
        return len(self.delivered), sum(len(each) for samples in self.so_far.values() for each in samples.values())

    @property
    def can_be_kept(self) -> bool:
        """Whether it is worth keeping, and has nothing but what is kept."""
        completions = [each for _, delivered in self.delivered for each in delivered]
        return any(self.length) and all(getattr(each, name) is None for each in completions for name in _NOT_KEPT)

    def to_json(self) -> str:
        delivered = [[place, [_kept(each) for each in completions]] for place, completions in self.delivered]
        so_far = [
            [place, [[index, _packed(tokens)] for index, tokens in samples.items()]]
            for place, samples in self.so_far.items()
        ]
        return json.dumps([delivered, so_far, self.num_tokens])

    @classmethod
    def from_json(cls, value: Any) -> UnderWay:
        """Raise ValueError or TypeError for what is none."""
        delivered, so_far, num_tokens = value
        return cls(
            [(_int(place), [_completion(each) for each in completions]) for place, completions in delivered],
            {_int(place): {_int(index): _unpacked(each) for index, each in samples} for place, samples in so_far},
            _int(num_tokens),
        )


def answer_to_json(answer: Answer) -> str:
    return json.dumps([getattr(answer, each.name) for each in fields(Answer)], default=_plain)


def answer_from_json(value: Any) -> Answer:
    """Raise ValueError or TypeError for what is no answer."""
    values = [_frozen(each) for each in value]
    if len(values) != len(fields(Answer)) or not isinstance(values[8], dict):
        raise ValueError("an answer has other fields")
    return Answer(*values)


def _kept(completion: Any) -> list[Any]:
    index, token_ids, *others = (getattr(completion, each.name) for each in fields(KeptCompletion)[:-1])
    return [index, _packed(token_ids), *others]


def _completion(values: Any) -> KeptCompletion:
    if not all(isinstance(value, kind) for value, kind in zip(values, _KEPT_TYPES, strict=True)):
        raise ValueError("a completion has other fields")
    index, token_ids, *others = values
    return KeptCompletion(index, _unpacked(token_ids), *others)


def _packed(token_ids: Sequence[int]) -> str:
    return b64encode(array("i", token_ids).tobytes()).decode()


def _unpacked(text: Any) -> list[int]:
    return array("i", b64decode(text, validate=True)).tolist()


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


#: An array of numbers in JSON.
_ARRAY = "\0array"


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return {_ARRAY: b64encode(value.tobytes()).decode(), "type": value.typecode}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no value of an answer")


def _frozen(value: Any) -> Any:
    """Return a value as answers have it: lists as tuples, numbers in arrays."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return array(str(value.get("type")), b64decode(value[_ARRAY], validate=True))
    return {name: _frozen(each) for name, each in value.items()}
