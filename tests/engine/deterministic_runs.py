"""Requests computed alone and all at once, and what of their completions must be the same bits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine import Completion, Engine, EngineConfig, EngineStats, SamplingParams, ScoringParams

Request = tuple[list[int], SamplingParams | ScoringParams]
Bits = tuple[object, ...]  # all that a completion says, so that two are equal when all their bits are

MIXES: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 5}, {"temperature": 0.8, "logprobs": 0},
    {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5, "min_tokens": 4, "logprobs": 1},
    {"top_p": 0.9, "repetition_penalty": 1.4, "prompt_logprobs": 2}, {"n": 2, "logprobs": 3, "min_p": 0.05},
    {"temperature": 0.0, "logit_bias": {7: 3, 8: 2.5, 9: 2}, "prompt_logprobs": 0, "logprobs": 0},
]  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How all requests are computed at once. settings: of EngineConfig.

    urgent: while the others run, a fifth of them comes and thrusts some out.
    """

    settings: Mapping[str, Any]
    urgent: bool = False


def make_requests(number: int, vocab_size: int, seed: int, max_tokens: int) -> list[Request]:
    """Prompts of 1 to 260 tokens, of which many begin alike, some of them scored alone; each with a seed."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (0, 30, 70, 190)]
    requests: list[Request] = []
    for i in range(number):
        tail = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 70))]
        prompt = prefixes[i % len(prefixes)] + tail
        values = MIXES[i % len(MIXES)]
        params = SamplingParams(max_tokens=rng.randrange(4, max_tokens + 1), seed=1000 + i, ignore_eos=True)
        if i % 7 == 6:
            continuations = [[tail[0], 9], [tail[0], 9, 11], [12, *tail]]
            requests.append((prompt, ScoringParams(continuations, score_end="auto")))
        else:
            requests.append((prompt, replace(params, **values)))
    return requests


def bits_of(completion: Completion) -> Bits:
    """Log probabilities as they are, whose floats compare by value."""
    return (
        completion.index,
        tuple(completion.token_ids),
        completion.text,
        completion.finish_reason,
        repr(completion.logprobs),
        repr(completion.prompt_logprobs),
        repr(completion.loglikelihoods),
    )


def run_all(
    config: EngineConfig, requests: Sequence[Request], order: Sequence[int], *, urgent: bool
) -> tuple[list[list[Bits]], EngineStats]:
    """Each request's completions, all in the engine at once; added in that order. urgent: as of a Way."""
    found: list[list[Bits]] = [[] for _ in requests]
    with Engine(config) as engine:
        done: list[Completion] = []
        first = order[: len(order) * 4 // 5] if urgent else order
        for i in first:
            engine.add(str(i), *requests[i], lane=int(urgent))
        for i in order[len(first) :]:
            done += engine.step()
            engine.add(str(i), *requests[i])
        while engine.has_unfinished:
            done += engine.step()
        for completion in done:
            found[int(completion.request_id)].append(bits_of(completion))
        return [sorted(each, key=lambda bits: str(bits[0])) for each in found], engine.stats()


def run_alone(config: EngineConfig, requests: Sequence[Request]) -> list[list[Bits]]:
    """Each request's completions, one request after another and nothing cached."""
    with Engine(replace(config, enable_prefix_caching=False)) as engine:
        found: list[list[Bits]] = []
        for prompt, params in requests:
            engine.add("alone", prompt, params)
            done: list[Bits] = []
            while engine.has_unfinished:
                done += map(bits_of, engine.step())
            found.append(sorted(done, key=lambda bits: str(bits[0])))
        return found


def differing(expected: Sequence[list[Bits]], found: Sequence[list[Bits]]) -> list[int]:
    """Which requests have other bits."""
    return [i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other]
