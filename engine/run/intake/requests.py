"""Requests that one call makes of many things at once: each with a number for an id."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import zip_longest
from typing import Any

from engine.errors import DuplicateRequest, InvalidPrompt, InvalidRequest, ScoringFailed
from engine.sampling.parameters.request_kinds import RequestParams
from engine.sampling.parameters.sampling import SamplingParams
from engine.sampling.parameters.scoring import ScoringParams
from engine.schedule.sequences.outputs import Completion, LogLikelihood
from engine.schedule.sequences.prepared_prompt import BlockKey, PreparedPrompt
from engine.schedule.sequences.score_tree import ends_needed, shape_of
from engine.text.continuations import Tail
from engine.text.prompts import Prompt, PromptReader

Request = tuple[str, Prompt, RequestParams]
Asked = tuple[tuple[int, ...], int]  # a context, and the number of a continuation among its own
NOTHING = LogLikelihood(0.0, 0, is_greedy=True)

#: Of a prompt and what stands behind it, in all sequences of a request together: each holds the prompt's.
MAX_TREE_TOKENS = 1 << 25


def check_request(request_id: object, lane: object, unfinished: Container[str]) -> None:
    """Raise InvalidRequest for what can be no id, or no lane, DuplicateRequest for an unfinished id."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"a request id must be a string, got {request_id!r}")
    if request_id in unfinished:
        raise DuplicateRequest(f"request {request_id!r} is unfinished; use another id, or abort it first")
    if isinstance(lane, bool) or not isinstance(lane, int) or lane < 0:
        raise InvalidRequest(f"lane must be an integer of 0 or more, got {lane!r}")


def numbered(
    prompts: Iterable[Prompt], params: RequestParams | Iterable[RequestParams] | None
) -> Iterator[Request]:
    """Number the prompts and give each its params. Raises InvalidRequest if their numbers differ."""
    if isinstance(prompts, str):
        raise InvalidPrompt("prompts must be an iterable of prompts; put a single one into a list")
    if params is None or isinstance(params, RequestParams):
        for i, prompt in enumerate(prompts):
            yield str(i), prompt, params or SamplingParams()
        return
    missing: Any = object()
    for i, (prompt, own) in enumerate(zip_longest(prompts, params, fillvalue=missing)):
        if prompt is missing or own is missing:
            raise InvalidRequest(f"there are not as many prompts as params: one of them ended after {i}")
        yield str(i), prompt, own


def prepare_scores(
    prompt: object,
    params: ScoringParams,
    prompts: PromptReader,
    keys_of: Callable[[list[int]], list[BlockKey]],
    end_token_ids: tuple[int, ...],
) -> PreparedPrompt:
    """A prompt whose continuations are to be scored. Raises InvalidPrompt or PromptTooLong.

    end_token_ids: those that end the model's texts.
    """
    token_ids, tails = prompts.continued(
        prompt,
        params.continuations,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        num_ends=int(params.score_end is not False),
    )
    ends = params.score_end
    if ends == "auto":
        _check_distinct(tails)
        ends = ends_needed(tails)
    if ends and not end_token_ids:
        raise InvalidPrompt("no token ends this model's texts, so none can be scored behind a continuation")
    shape = shape_of(tails, end_token_ids if ends else ())
    num_tokens = sum(len(token_ids) + len(branch.token_ids) for branch in shape.branches)
    if num_tokens > MAX_TREE_TOKENS:
        raise InvalidPrompt(
            f"the prompt stands before {len(shape.branches)} continuations that part, {num_tokens} tokens in "
            f"all, more than the limit of {MAX_TREE_TOKENS}: ask for fewer at a time"
        )
    return PreparedPrompt(token_ids, keys_of(token_ids), shape, len(token_ids) + tails[0][1])


def _check_distinct(tails: tuple[Tail, ...]) -> None:
    places: dict[Tail, int] = {}
    for place, tail in enumerate(tails):
        if places.setdefault(tail, place) != place:
            raise InvalidPrompt(
                f"continuations {places[tail]} and {place} are the same tokens: one of them is enough"
            )


class Scores:
    """Pairs of a context and a continuation as requests, one for each context."""

    def __init__(self, pairs: Iterable[tuple[Prompt, Prompt]], prompts: PromptReader) -> None:
        """Raises InvalidRequest or a subclass for the first pair that cannot be scored."""
        self._groups: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        self._asked = [self._group(*_read(place, pair, prompts)) for place, pair in enumerate(pairs)]

    def _group(self, token_ids: list[int], score_from: int) -> Asked | None:
        if score_from == len(token_ids):
            return None
        context, continuation = tuple(token_ids[:score_from]), tuple(token_ids[score_from:])
        group = self._groups.setdefault(context, {})
        return context, group.setdefault(continuation, len(group))

    def requests(self) -> Iterator[Request]:
        """Return requests in the order of their tokens, so that neighbours share the most."""
        for number, context in enumerate(sorted(self._groups)):
            yield str(number), list(context), ScoringParams(tuple(self._groups[context]))

    def results(self, done: dict[str, list[Completion]]) -> list[LogLikelihood]:
        """One for each pair. Raises ScoringFailed for the first that has none."""
        found = {context: done[str(number)][0] for number, context in enumerate(sorted(self._groups))}
        return [
            NOTHING if asked is None else _checked(place, found[asked[0]], asked[1])
            for place, asked in enumerate(self._asked)
        ]


def _checked(place: int, found: Completion, number: int) -> LogLikelihood:
    if found.loglikelihoods is None:
        raise ScoringFailed(place, found.error or "the engine gave no reason")
    return found.loglikelihoods[number]


def _read(place: int, pair: object, prompts: PromptReader) -> tuple[list[int], int]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise InvalidRequest(f"pair {place} must be a context and a continuation, got {type(pair).__name__}")
    try:
        return prompts.pair(*pair)
    except InvalidRequest as error:
        raise type(error)(f"pair {place}: {error}") from error
