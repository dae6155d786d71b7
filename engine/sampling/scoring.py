"""ScoringParams: the other kind of request, which asks how likely tokens are and for no new one."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidSampling
from engine.sampling.params import SamplingParams
from engine.sampling.ranges import MAX_COUNT, Range

SCORE_FROM = Range(1, MAX_COUNT, integer=True)
NO_NEW_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)  # what a sequence has that generates nothing


@dataclass(frozen=True)
class ScoringParams:
    """Ask how likely a prompt's last tokens are. Raises InvalidSampling for a value that cannot be.

    score_from: the place of the first of them, 1 or more: of the first token nothing can be said.
    """

    score_from: int

    def __post_init__(self) -> None:
        SCORE_FROM.check("score_from", self.score_from)


def check_score_from(params: ScoringParams, num_tokens: int) -> None:
    """Raise InvalidSampling unless a prompt of so many tokens has one there."""
    if params.score_from >= num_tokens:
        raise InvalidSampling(
            f"score_from={params.score_from} leaves nothing to score of a prompt of {num_tokens} tokens"
        )
