"""Numbers the prompts of a call, and makes requests of pairs whose likelihood is asked."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from engine.errors import InvalidPrompt, InvalidRequest, ScoringFailed
from engine.sampling.request_kinds import RequestParams, ScoringParams
from engine.sampling.sampling_params import SamplingParams
from engine.schedule.outputs import Completion, LogLikelihood
from engine.schedule.prepared_prompt import PreparedPrompt
from engine.text.prompts import Context, Prompt, PromptReader

Request = tuple[str, Prompt | PreparedPrompt, RequestParams]


def numbered(
    prompts: Iterable[Prompt], params: RequestParams | Iterable[RequestParams] | None
) -> Iterator[Request]:
    """Number the prompts and give each its params. Raises InvalidRequest if one of the two ends before the other."""
    if isinstance(prompts, str):
        raise InvalidPrompt("prompts must be an iterable of prompts; put a single one into a list")
    if params is None or isinstance(params, RequestParams):
        for i, prompt in enumerate(prompts):
            yield str(i), prompt, params or SamplingParams()
        return
    missing: Any = object()
    pairs = zip_longest(prompts, params, fillvalue=missing)
    for i, (prompt, prompt_params) in enumerate(pairs):
        if prompt is missing or prompt_params is missing:
            raise InvalidRequest(
                f"there are not as many prompts as params: one of them ended after {i}"
            )
        yield str(i), prompt, prompt_params


class Scores:
    """Pairs of a context and a continuation, made into one request for each context."""

    def __init__(
        self,
        pairs: Iterable[tuple[Prompt, Prompt]],
        prompts: PromptReader,
        prepare: Callable[[Prompt, ScoringParams], PreparedPrompt],
    ) -> None:
        """Prepare all pairs. Raises InvalidRequest or a subclass for the first that cannot be scored."""
        groups: dict[Context, list[Context]] = {}
        first_pairs: dict[Context, int] = {}  # of each context, the number of its first pair
        # for each pair its context, and the number of its continuation; None for an empty continuation
        self._places: list[tuple[Context, int] | None] = []
        for pair_number, pair in enumerate(pairs):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise InvalidRequest(
                    f"pair {pair_number} must be a context and a continuation, got {type(pair).__name__}"
                )
            with _naming(pair_number):
                continuation, context = prompts.pair(*pair)
            if not continuation:
                self._places.append(None)
                continue
            group = groups.setdefault(context, [])
            self._places.append((context, len(group)))
            group.append(continuation)
            first_pairs.setdefault(context, pair_number)
        self._ready: dict[Context, tuple[PreparedPrompt, ScoringParams]] = {}
        for context, group in groups.items():
            with _naming(first_pairs[context]):
                params = ScoringParams(group)
                prompt = context if isinstance(context, str) else list(context)
                self._ready[context] = prepare(prompt, params), params

    def requests(self) -> Iterator[Request]:
        """Return requests sorted by their tokens, so that neighbours share the longest prefixes."""
        ready = [
            (str(number), prompt, params)
            for number, (prompt, params) in enumerate(self._ready.values())
        ]
        return iter(sorted(ready, key=lambda request: request[1].token_ids))

    def results(self, done: dict[str, list[Completion]]) -> list[LogLikelihood]:
        """Return one score for each pair. Raises ScoringFailed for the first without one."""
        completions = {context: done[str(number)][0] for number, context in enumerate(self._ready)}
        results: list[LogLikelihood] = []
        for pair_number, place in enumerate(self._places):
            if place is None:
                results.append(LogLikelihood(0.0, 0, is_greedy=True))
                continue
            context, number = place
            completion = completions[context]
            if completion.loglikelihoods is None:
                raise ScoringFailed(pair_number, completion.error or "the engine gave no reason")
            results.append(completion.loglikelihoods[number])
        return results


@contextmanager
def _naming(pair_number: int) -> Iterator[None]:
    """Put the pair's number before the text of an InvalidRequest that the block raises."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(f"pair {pair_number}: {error}") from error
