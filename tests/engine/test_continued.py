"""A completion that was cut goes on: as it would have if it had had as many tokens at once."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import (
    Completion,
    Engine,
    EngineConfig,
    InvalidPrompt,
    InvalidRequest,
    PromptTooLong,
    SamplingParams,
)

PROMPT = [5, 9, 33, 7, 101, 2, 60, 18, 44]
DRAWN = SamplingParams(max_tokens=24, temperature=1.5, seed=7, ignore_eos=True)
WISHES = {
    "greedy": replace(DRAWN, temperature=0.0),
    "penalties": replace(
        DRAWN, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3
    ),
    "bad words": replace(DRAWN, bad_words=["a", "th"], logit_bias={9: 3.0}),
    "least tokens": replace(DRAWN, ignore_eos=False, stop_token_ids=list(range(60)), min_tokens=12),
    "reasoning": replace(
        DRAWN, thinking_token_budget=3, reasoning_marks=("e", "qqxq"), separate_reasoning=True
    ),
    "log probabilities": replace(DRAWN, logprobs=2),
    "pattern": replace(DRAWN, structured_outputs={"regex": "[ab]{3,30}"}),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="in turns", marks=pytest.mark.long),
        pytest.param(True, id="overlapping"),
    ],
)
def engine(folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = EngineConfig(
        str(folders["gqa2_tied_hub"]),
        dtype="float32",
        kv_cache_bytes=1 << 18,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        async_scheduling=request.param,
        deterministic=True,
    )
    with Engine(config) as built:
        yield built


def run(engine: Engine, *requests: tuple[str, SamplingParams, list[int]]) -> dict[str, Completion]:
    for name, params, continued in requests:
        engine.add(name, PROMPT, params, continued=continued)
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


RESUMED = {
    **WISHES,
    "all log probabilities": replace(DRAWN, n=2, logprobs=1, prompt_logprobs=3, ignore_eos=False),
    "of the prompt": replace(DRAWN, n=2, prompt_logprobs=0, stop_token_ids=list(range(8))),
    "two samples": replace(DRAWN, n=2, ignore_eos=False, stop_token_ids=list(range(8))),
    "stop string": replace(DRAWN, stop=["qu", "e"], min_tokens=3),
}


def steps(
    engine: Engine, params: SamplingParams, resumed: Mapping[int, list[int]]
) -> Iterator[list[Completion]]:
    engine.add("it", PROMPT, params, resumed=resumed)
    while engine.has_unfinished:
        yield engine.step()


def finished(
    engine: Engine, params: SamplingParams, resumed: Mapping[int, list[int]]
) -> list[Completion]:
    done = [each for found in steps(engine, params, resumed) for each in found]
    return sorted(done, key=lambda each: each.index)


@pytest.mark.parametrize("wish", RESUMED)
def test_a_request_goes_on_wherever_it_was(engine: Engine, wish: str) -> None:
    params = RESUMED[wish]
    whole = finished(engine, params, {})
    cuts: list[dict[int, list[int]]] = []
    done: dict[int, list[int]] = {}
    for found in steps(engine, params, {}):
        done |= {each.index: each.token_ids for each in found}
        cuts.append(done | engine.samples_so_far().get("it", {}))
    assert any(cuts[0]) or len(cuts) > 1
    # The two engines share the cuts: one takes every other, one those between.
    for so_far in cuts[engine.config.async_scheduling :: 2]:
        again = finished(engine, params, so_far)
        for each in (
            again
        ):  # the last token is computed anew where its log probability is wanted, or the prompt's
            is_scored = params.logprobs is not None or (
                each.index == 0 and params.prompt_logprobs is not None
            )
            assert each.num_continued == max(0, len(so_far[each.index]) - is_scored)
        assert [replace(each, num_continued=0, num_cached_tokens=0) for each in again] == [
            replace(each, num_cached_tokens=0) for each in whole
        ]
        assert all(each.num_cached_tokens <= len(PROMPT) for each in again)


def test_it_goes_on_behind_what_it_continued(engine: Engine) -> None:
    whole = run(engine, ("whole", DRAWN, []))["whole"]
    less = replace(DRAWN, max_tokens=14)
    engine.add("it", PROMPT, less, continued=cut(whole, 10), resumed={0: whole.token_ids[10:16]})
    assert engine.samples_so_far() == {"it": {0: whole.token_ids[:16]}}
    more: list[Completion] = []
    while engine.has_unfinished:
        more += engine.step()
    assert (more[0].token_ids, more[0].num_continued) == (whole.token_ids, 16)


def test_a_completion_as_long_as_the_model_takes_has_ended(engine: Engine) -> None:
    params = replace(DRAWN, max_tokens=1 << 20)
    (whole,) = finished(engine, params, {})
    assert len(PROMPT) + len(whole.token_ids) == engine.max_model_len
    for length in (len(whole.token_ids) - 1, len(whole.token_ids)):
        (again,) = finished(engine, params, {0: whole.token_ids[:length]})
        assert (again.token_ids, again.text, again.finish_reason) == (
            whole.token_ids,
            whole.text,
            "length",
        )


@pytest.mark.parametrize(
    "resumed",
    [{0: [1 << 30]}, {0: [-1]}, {1: [4]}, {0: [9, 5]}, {0: [5] * 25}, {0: [5] * (1 << 16)}],
)
def test_what_it_cannot_have_had_is_left_out(engine: Engine, resumed: dict[int, list[int]]) -> None:
    params = replace(DRAWN, stop_token_ids=[9])
    finished(engine, params, {})  # fills the cache
    assert finished(engine, params, resumed) == finished(engine, params, {})


def cut(completion: Completion, length: int) -> list[int]:
    return completion.token_ids[:length]


@pytest.mark.parametrize("wish", WISHES)
def test_a_completion_that_goes_on_is_the_one_of_more_tokens_at_once(
    engine: Engine, wish: str
) -> None:
    params = WISHES[wish]
    whole = run(engine, ("whole", params, []))["whole"]
    assert whole.num_continued == 0
    lengths = [1, 7, 8]
    if not params.min_tokens:
        lengths.append(len(whole.token_ids) - 1)
    found = run(
        engine,
        *[
            (
                str(length),
                replace(params, max_tokens=params.max_tokens - length),
                cut(whole, length),
            )
            for length in lengths
        ],
    )
    for length in lengths:
        more = found[str(length)]
        assert more.token_ids == whole.token_ids
        assert (more.text, more.reasoning) == (whole.text, whole.reasoning)
        assert more.finish_reason == whole.finish_reason
        assert (more.num_prompt_tokens, more.num_continued) == (len(PROMPT), length)
        if whole.logprobs is not None:
            assert more.logprobs is not None
            assert [list(each) for each in more.logprobs] == [
                list(each) for each in whole.logprobs[length:]
            ]


def test_what_it_has_already_comes_from_the_cache(engine: Engine) -> None:
    whole = run(engine, ("whole", DRAWN, []))["whole"]
    more = run(engine, ("more", DRAWN, whole.token_ids))["more"]
    assert len(more.token_ids) == 2 * DRAWN.max_tokens
    # all but the last token, which no step of the first completion has computed
    assert more.num_cached_tokens >= len(PROMPT) + len(whole.token_ids) - 4


@pytest.mark.parametrize(
    ("continued", "error", "says"),
    [
        ([1 << 30], InvalidPrompt, "outside the vocabulary"),
        ([True], InvalidPrompt, "must be integers"),
        ([1] * (1 << 16), PromptTooLong, "prompt and completion have 65545 tokens"),
        ([5, 9], InvalidRequest, "cannot go on: it has ended"),
    ],
)
def test_what_cannot_go_on_is_refused_and_leaves_nothing(
    engine: Engine, continued: list[Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        engine.add("bad", PROMPT, replace(DRAWN, stop_token_ids=[9]), continued=continued)
    assert not engine.has_unfinished
