"""ScoringParams: the other kind of request, which asks how likely tokens are and for no new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import InvalidSampling
from engine.sampling.parameters.ranges import TOKEN_ID, brief
from engine.sampling.parameters.sampling import RANGES, SamplingParams

NO_NEW_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)  # what a sequence has that generates nothing
NAMES = ("continuations", "score_end", "truncate_prompt_tokens")


@dataclass(frozen=True)
class ScoringParams:
    """Ask how likely each continuation of a prompt is. Raises InvalidSampling for a value that cannot be.

    continuations: texts, or lists of token ids, each behind the prompt.
    score_end: score with each of them that the text ends behind it: the probability of all tokens that end
        the model's texts. "auto": where one of them is the beginning of another, in tokens, so that none of
        these answers holds another; then no two may be the same tokens.
    truncate_prompt_tokens: only the last so many tokens of the prompt are read; -1 for as many as fit.
    """

    continuations: Sequence[str | Sequence[int]]
    score_end: bool | Literal["auto"] = False
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.continuations, str) or not isinstance(self.continuations, (list, tuple)):
            kind = type(self.continuations).__name__
            raise InvalidSampling(
                f"continuations must be a list of texts or of lists of token ids, got {kind}"
            )
        if not self.continuations:
            raise InvalidSampling("continuations is empty: nothing is asked for")
        read = tuple(_read(number, each) for number, each in enumerate(self.continuations))
        object.__setattr__(self, "continuations", read)
        if self.score_end is not True and self.score_end is not False and self.score_end != "auto":
            raise InvalidSampling('score_end must be true, false or "auto"', brief(self.score_end))
        if self.truncate_prompt_tokens is not None:
            RANGES["truncate_prompt_tokens"].check("truncate_prompt_tokens", self.truncate_prompt_tokens)
            if self.truncate_prompt_tokens == 0:
                raise InvalidSampling(
                    "truncate_prompt_tokens=0 leaves nothing of the prompt; -1 is what fits"
                )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ScoringParams:
        """Read a mapping as SamplingParams.from_mapping does."""
        for name in mapping:
            if name not in NAMES:
                raise InvalidSampling(
                    f"{brief(name)} is nothing that scoring takes; it takes {', '.join(NAMES)}"
                )
        return cls(**{"continuations": (), **mapping})

    @property
    def n(self) -> int:
        """Completions that such a request gives."""
        return 1


def _read(number: int, continuation: object) -> str | Sequence[int]:
    if isinstance(continuation, str):
        return continuation
    if not isinstance(continuation, (list, tuple)):
        raise InvalidSampling(
            f"continuation {number} must be a text or a list of token ids, got {type(continuation).__name__}"
        )
    for token_id in continuation:
        TOKEN_ID.check(f"a token id of continuation {number}", token_id)
    return tuple(continuation)
