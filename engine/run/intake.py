"""Checks, numbers and seeds requests as they come in, and prepares prompts whose continuations are scored."""

import random
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

from engine.errors import (
    DuplicateRequest,
    InvalidPrompt,
    InvalidRequest,
    InvalidSampling,
    ScoringFailed,
)
from engine.sampling.request_kinds import RequestParams, ScoringParams
from engine.sampling.sampling_params import SamplingParams
from engine.schedule.outputs import Completion, LogLikelihood
from engine.schedule.prepared_prompt import BlockKey, PreparedPrompt
from engine.schedule.score_tree import ends_needed, shape_of
from engine.text.prompts import Context, Prompt, PromptReader, Tail

Request = tuple[str, Prompt | PreparedPrompt, RequestParams]

#: The most tokens of all sequences of a scoring request together; each of them holds the prompt's tokens too.
MAX_TREE_TOKENS = 1 << 25


#: The most log probabilities that one request may ask for. Each takes about 150 bytes until its completion is given.
MAX_LOGPROB_ENTRIES = 1 << 21


def check_logprobs(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> None:
    """Raise InvalidSampling if a request's log probabilities alone could fill the engine's memory."""
    num_entries = 0
    if params.prompt_logprobs is not None:
        num_entries += num_prompt_tokens * (params.prompt_logprobs + 1)
    if params.logprobs is not None:
        longest = min(params.max_tokens, max_model_len - num_prompt_tokens)
        num_entries += params.n * longest * (params.logprobs + 1)
    if num_entries > MAX_LOGPROB_ENTRIES:
        raise InvalidSampling(
            f"the request may have {num_entries} log probabilities, more than the limit of {MAX_LOGPROB_ENTRIES}: ask "
            "for fewer by logprobs or prompt_logprobs, a lower max_tokens or n, or a shorter prompt"
        )


def check_request(request_id: object, lane: object, unfinished: Container[str]) -> None:
    """Raise InvalidRequest for an impossible id or lane, DuplicateRequest for an unfinished id."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"a request id must be a string, got {request_id!r}")
    if request_id in unfinished:
        raise DuplicateRequest(
            f"request {request_id!r} is unfinished; use another id, or abort it first"
        )
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
            raise InvalidRequest(
                f"there are not as many prompts as params: one of them ended after {i}"
            )
        yield str(i), prompt, own


def prepare_scores(
    prompt: object,
    params: ScoringParams,
    prompts: PromptReader,
    keys_of: Callable[[list[int]], list[BlockKey]],
    end_token_ids: tuple[int, ...],
) -> PreparedPrompt:
    """Prepare a prompt whose continuations are to be scored. Raises InvalidPrompt or PromptTooLong."""
    continued = prompts.continued(
        prompt,
        params.continuations,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        num_ends=int(params.score_end is not False),
        are_labels=params.score_end == "auto",
    )
    token_ids, tails = continued.token_ids, continued.tails
    ends = params.score_end
    if ends == "auto":
        places: dict[Tail, int] = {}
        for place, tail in enumerate(tails):
            if (other := places.setdefault(tail, place)) != place:
                raise InvalidPrompt(
                    f"continuations {other} and {place} are the same tokens: one of them is enough"
                )
        ends = ends_needed(tails)
    if ends and not end_token_ids:
        raise InvalidPrompt(
            "no token ends this model's texts, so none can be scored behind a continuation"
        )
    shape = shape_of(tails, end_token_ids if ends else ())
    num_tokens = sum(len(token_ids) + len(branch.token_ids) for branch in shape.branches)
    if num_tokens > MAX_TREE_TOKENS:
        raise InvalidPrompt(
            f"the prompt stands before {len(shape.branches)} continuations that part, {num_tokens} tokens in "
            f"all, more than the limit of {MAX_TREE_TOKENS}: ask for fewer at a time"
        )
    return PreparedPrompt(token_ids, keys_of(token_ids), shape, continued.num_prompt_tokens)


class Scores:
    """Pairs of a context and a continuation as requests, one for each context."""

    def __init__(
        self,
        pairs: Iterable[tuple[Prompt, Prompt]],
        prompts: PromptReader,
        prepare: Callable[[Prompt, ScoringParams], PreparedPrompt],
    ) -> None:
        """Prepare all pairs. Raises InvalidRequest or a subclass for the first that cannot be scored."""
        groups: dict[Context, list[Context]] = {}
        places: dict[Context, int] = {}  # the first pair of each context
        self._asked: list[
            tuple[Context, int] | None
        ] = []  # of each pair: its context, and which continuation of it
        for place, pair in enumerate(pairs):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise InvalidRequest(
                    f"pair {place} must be a context and a continuation, got {type(pair).__name__}"
                )
            with _naming(place):
                continuation, context = prompts.pair(*pair)
            group = groups.setdefault(context, []) if continuation else []
            self._asked.append((context, len(group)) if continuation else None)
            group.append(continuation)
            places.setdefault(context, place)
        self._ready: dict[Context, tuple[PreparedPrompt, ScoringParams]] = {}
        for context, group in groups.items():
            with _naming(places[context]):
                params = ScoringParams(group)
                prompt = context if isinstance(context, str) else list(context)
                self._ready[context] = prepare(prompt, params), params

    def requests(self) -> Iterator[Request]:
        """Return requests sorted by their tokens, so that neighbours share the longest prefixes."""
        ready = sorted(enumerate(self._ready.values()), key=lambda each: each[1][0].token_ids)
        return ((str(number), prompt, params) for number, (prompt, params) in ready)

    def results(self, done: dict[str, list[Completion]]) -> list[LogLikelihood]:
        """Return one score for each pair. Raises ScoringFailed for the first without one."""
        found = {context: done[str(number)][0] for number, context in enumerate(self._ready)}
        results = []
        for place, asked in enumerate(self._asked):
            if asked is None:
                results.append(LogLikelihood(0.0, 0, is_greedy=True))
                continue
            context, number = asked
            if (scored := found[context]).loglikelihoods is None:
                raise ScoringFailed(place, scored.error or "the engine gave no reason")
            results.append(scored.loglikelihoods[number])
        return results


@contextmanager
def _naming(place: int) -> Iterator[None]:
    """Have an InvalidRequest say which pair it is about: the first one, if it is about a context."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(f"pair {place}: {error}") from error


class Seeds:
    """Draws seeds, from one generator, or from the prompt if results must depend on the request alone."""

    def __init__(self, seed: int, *, from_prompts: bool) -> None:
        self._seed, self._from_prompts = seed, from_prompts
        self._drawn = random.Random(seed)

    def draw(self, token_ids: Sequence[int]) -> int:
        """Draw a seed of 64 bits. token_ids: of the prompt."""
        if not self._from_prompts:
            return self._drawn.getrandbits(64)
        digest = blake2b(f"{self._seed}:".encode(), digest_size=8)
        digest.update(array("q", token_ids).tobytes())
        return int.from_bytes(digest.digest(), "little")
