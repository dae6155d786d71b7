"""The parameters of each kind of request: SamplingParams, and those of scores, embeddings and classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from engine.errors import InvalidRequest, InvalidSampling
from engine.sampling.parameter_values import (
    MAX_COUNT,
    TOKEN_ID,
    Range,
    brief,
    check_adapter_name,
    check_switch,
)
from engine.sampling.sampling_params import SamplingParams, check_truncation

DIMENSIONS = Range(1, MAX_COUNT, integer=True)


@dataclass(frozen=True)
class PoolingParams:
    """The form of a text's embedding. Raises InvalidSampling for an impossible value.

    dimensions: how many of the first numbers to keep (for models trained for it, Matryoshka); None keeps all.
    normalize: scale to length 1, after the cut. None does so if the checkpoint normalizes its embeddings, or if
        dimensions are given.
    prompt_name: the checkpoint's prompt before the text, such as "query"; None takes its default one, if it has one.
        Not for prompts of token ids.
    adapter: see SamplingParams.
    truncate_prompt_tokens: read only this many of the first tokens, special ones included; -1 reads as many as the
        model takes.
    """

    n: ClassVar[int] = 1  # completions of such a request
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            DIMENSIONS.check("dimensions", self.dimensions)
        if self.normalize is not None:
            check_switch("normalize", self.normalize)
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise InvalidSampling("prompt_name must be a text", brief(self.prompt_name))
        check_adapter_name(self.adapter)
        check_truncation(self.truncate_prompt_tokens)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> PoolingParams:
        """Build from values that came from outside. Raises InvalidSampling for an unknown name."""
        _check_names(mapping, cls, "says nothing of embeddings")
        return cls(**mapping)


NO_NEW_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)  # of sequences that generate nothing


@dataclass(frozen=True)
class ScoringParams:
    """Ask how likely each continuation of a prompt is. Raises InvalidSampling for an impossible value.

    continuations: texts, or lists of token ids, each behind the prompt.
    score_end: add the probability that the text ends behind each. "auto" is for labels, which are compared with each
        other. All are then scored from the first token at which any of them differ, as a label may merge with the
        prompt's end. The end is added if one label is the beginning of another. No two may have the same tokens.
    truncate_prompt_tokens: read only this number of the prompt's last tokens; -1 reads as many as fit.
    adapter: see SamplingParams.
    """

    n: ClassVar[int] = 1
    continuations: Sequence[str | Sequence[int]]
    score_end: bool | Literal["auto"] = False
    truncate_prompt_tokens: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.continuations, str) or not isinstance(self.continuations, (list, tuple)):
            kind = type(self.continuations).__name__
            raise InvalidSampling(
                f"continuations must be a list of texts or of lists of token ids, got {kind}"
            )
        if not self.continuations:
            raise InvalidSampling("continuations is empty: nothing is asked for")
        read = tuple(
            _read(number, continuation) for number, continuation in enumerate(self.continuations)
        )
        object.__setattr__(self, "continuations", read)
        if self.score_end is not True and self.score_end is not False and self.score_end != "auto":
            raise InvalidSampling('score_end must be true, false or "auto"', brief(self.score_end))
        check_adapter_name(self.adapter)
        check_truncation(self.truncate_prompt_tokens)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ScoringParams:
        """Build from values that came from outside. Raises InvalidSampling for an unknown name."""
        _check_names(mapping, cls, "is nothing that scoring takes")
        return cls(**{"continuations": (), **mapping})


def _check_names(mapping: Mapping[str, Any], kind: type[Any], problem: str) -> None:
    names = [field.name for field in fields(kind)]
    for name in mapping:
        if name not in names:
            raise InvalidSampling(f"{brief(name)} {problem}; use {', '.join(names)}")


def _read(number: int, continuation: object) -> str | Sequence[int]:
    """Check a continuation, and return it. number: its index in the request's list."""
    if isinstance(continuation, str):
        return continuation
    if not isinstance(continuation, (list, tuple)):
        raise InvalidSampling(
            f"continuation {number} must be a text or a list of token ids, got {type(continuation).__name__}"
        )
    for token_id in continuation:
        TOKEN_ID.check(f"a token id of continuation {number}", token_id)
    return tuple(continuation)


@dataclass(frozen=True)
class ClassParams:
    """Ask for a text's classes, from a checkpoint that classifies. Raises InvalidSampling for an impossible value.

    pair: a second text, such as the document behind a query.
    truncate_prompt_tokens: read only this many of a single text's first tokens, special ones included; -1 reads as
        many as model and tokenizer take. A pair that is too long is always cut.
    """

    n: ClassVar[int] = 1
    adapter: ClassVar[None] = None  # models that classify by a head have none
    pair: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pair is not None and not isinstance(self.pair, str):
            raise InvalidSampling(f"pair must be a text, got {type(self.pair).__name__}")
        check_truncation(self.truncate_prompt_tokens)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ClassParams:
        """Build from values that came from outside. Raises InvalidSampling for an unknown name."""
        _check_names(mapping, cls, "is nothing that classifying takes")
        return cls(**mapping)


RequestParams = SamplingParams | ScoringParams | PoolingParams | ClassParams
#: The class of each kind's parameters, by the name that a request gives.
KINDS: Mapping[str, type[Any]] = {
    "generate": SamplingParams,
    "score": ScoringParams,
    "embed": PoolingParams,
    "classify": ClassParams,
}


def request_params(
    kind: str, values: Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]] | None = None
) -> RequestParams:
    """Make the parameters for `Engine.add` from a request's kind and values. Raises InvalidRequest or a subclass.

    tools: those of the chat. A kind that has a parameter `tools` takes them; others ignore them.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"no request is of the kind {kind!r}; there are {', '.join(KINDS)}")
    params_class = KINDS[kind]
    if tools and any(field.name == "tools" for field in fields(params_class)):
        values = {**values, "tools": tools}
    params: RequestParams = params_class.from_mapping(values)
    return params
