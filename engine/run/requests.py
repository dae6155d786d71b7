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
Asked = tuple[tuple[int, ...], int]  # token ids, and where those of the continuation begin
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
    """Pairs of a context and a continuation as requests: a tree, of which each token is scored once.

    In the order of their tokens a pair shares most with the one before it; what follows is scored for it.
    """

    def __init__(self, pairs: Iterable[tuple[Prompt, Prompt]], prompts: PromptReader) -> None:
        """Raises InvalidRequest or a subclass for the first pair that cannot be scored."""
        self._asked = [_read(place, pair, prompts) for place, pair in enumerate(pairs)]
        self._distinct = sorted({asked for asked in self._asked if asked[1] < len(asked[0])})
        self._first_own = [*map(_first_own, [None, *self._distinct], self._distinct)]

    def requests(self) -> Iterator[Request]:
        """In the order of their tokens."""
        for number, (asked, first_own) in enumerate(zip(self._distinct, self._first_own, strict=True)):
            if first_own < len(asked[0]):
                yield str(number), list(asked[0]), ScoringParams(first_own)

    def results(self, done: dict[str, list[Completion]]) -> list[LogLikelihood]:
        """One for each pair. Raises ScoringFailed for the first that has none."""
        found: dict[Asked, LogLikelihood | str] = {}
        before: LogLikelihood | str = NOTHING
        for number, (asked, first_own) in enumerate(zip(self._distinct, self._first_own, strict=True)):
            own = _outcome(done[str(number)][0]) if str(number) in done else NOTHING
            if first_own > asked[1]:
                num_skipped = asked[1] - self._distinct[number - 1][1]
                own = _joined(before, own, slice(num_skipped, num_skipped + first_own - asked[1]))
            before = found[asked] = own
        return [_checked(place, found.get(asked, NOTHING)) for place, asked in enumerate(self._asked)]


def _first_own(before: Asked | None, asked: Asked) -> int:
    """The place of the first token that has to be scored for `asked`, where `before` is scored."""
    token_ids, score_from = asked
    if before is None or before[1] > score_from:
        return score_from
    pairs = zip(before[0], token_ids, strict=False)
    num_shared = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(before[0]), len(token_ids)))
    return max(score_from, num_shared)


def _outcome(completion: Completion) -> LogLikelihood | str:
    return completion.loglikelihood or completion.error or "the engine gave no reason"


def _joined(before: LogLikelihood | str, own: LogLikelihood | str, shared: slice) -> LogLikelihood | str:
    """Of some tokens of `before`, and then of all of `own`."""
    if isinstance(before, str) or isinstance(own, str):
        return before if isinstance(before, str) else own
    return LogLikelihood.of(
        before.token_logprobs[shared] + own.token_logprobs, before.greedy_tokens[shared] + own.greedy_tokens
    )


def _checked(place: int, found: LogLikelihood | str) -> LogLikelihood:
    if isinstance(found, str):
        raise ScoringFailed(place, found)
    return found


def _read(place: int, pair: object, prompts: PromptReader) -> Asked:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise InvalidRequest(f"pair {place} must be a context and a continuation, got {type(pair).__name__}")
    try:
        token_ids, score_from = prompts.pair(*pair)
    except InvalidRequest as error:
        raise type(error)(f"pair {place}: {error}") from error
    return tuple(token_ids), score_from
