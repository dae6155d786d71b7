"""Requests that one call makes of many things at once: each with a number for an id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from engine.errors import InvalidPrompt, InvalidRequest, ScoringFailed
from engine.sampling.params import SamplingParams
from engine.sampling.scoring import ScoringParams
from engine.schedule.outputs import Completion, LogLikelihood
from engine.text.prompts import Prompt, PromptReader

Request = tuple[str, Prompt, SamplingParams | ScoringParams]
NOTHING = LogLikelihood(0.0, 0, is_greedy=True)


def numbered(
    prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[Request]:
    """Number the prompts and give each its params. Raises InvalidRequest if their numbers differ."""
    if isinstance(prompts, str):
        raise InvalidPrompt("prompts must be an iterable of prompts; put a single one into a list")
    if params is None or isinstance(params, SamplingParams):
        for i, prompt in enumerate(prompts):
            yield str(i), prompt, params or SamplingParams()
        return
    missing: Any = object()
    for i, (prompt, own) in enumerate(zip_longest(prompts, params, fillvalue=missing)):
        if prompt is missing or own is missing:
            raise InvalidRequest(f"there are not as many prompts as params: one of them ended after {i}")
        yield str(i), prompt, own


class Scores:
    """Pairs of a context and a continuation as requests, each once, those of one prefix together."""

    def __init__(self, pairs: Iterable[tuple[Prompt, Prompt]], prompts: PromptReader) -> None:
        """Raises InvalidRequest or a subclass for the first pair that cannot be scored."""
        self._asked = [_read(place, pair, prompts) for place, pair in enumerate(pairs)]
        distinct = sorted({asked for asked in self._asked if asked[1] < len(asked[0])})
        self._ids = {asked: str(number) for number, asked in enumerate(distinct)}

    def requests(self) -> Iterator[Request]:
        """In the order of their tokens."""
        for (token_ids, score_from), request_id in self._ids.items():
            yield request_id, list(token_ids), ScoringParams(score_from)

    def results(self, done: dict[str, list[Completion]]) -> list[LogLikelihood]:
        """One for each pair. Raises ScoringFailed for the first that has none."""
        results = []
        for place, asked in enumerate(self._asked):
            if asked not in self._ids:
                results.append(NOTHING)
                continue
            (completion,) = done[self._ids[asked]]
            if completion.loglikelihood is None:
                raise ScoringFailed(place, completion.error or "the engine gave no reason")
            results.append(completion.loglikelihood)
        return results


def _read(place: int, pair: object, prompts: PromptReader) -> tuple[tuple[int, ...], int]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise InvalidRequest(f"pair {place} must be a context and a continuation, got {type(pair).__name__}")
    try:
        token_ids, score_from = prompts.pair(*pair)
    except InvalidRequest as error:
        raise type(error)(f"pair {place}: {error}") from error
    return tuple(token_ids), score_from
