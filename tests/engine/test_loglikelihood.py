"""How likely continuations are: by prefill alone, as transformers' full logits say it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import (
    Engine,
    InvalidPrompt,
    InvalidRequest,
    LogLikelihood,
    PromptTooLong,
    SamplingParams,
    ScoringFailed,
)
from tests.engine.accounting import check_accounting
from tests.engine.test_labels import TOKENIZER, encoded
from tests.engine.test_logprobs import NAME, config

Truth = Callable[[tuple[int, ...]], Tensor]


@pytest.fixture(scope="module")
def small(folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine(config(folders[NAME])) as built:
        yield built
        check_accounting(built._scheduler)
        assert built.stats().free_blocks == built.stats().num_blocks


def expected(truth: Truth, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    rows = truth(tuple(context + continuation))[len(context) - 1 : -1]
    own = rows.gather(1, torch.tensor(continuation)[:, None])
    return own.sum().item(), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def check(found: LogLikelihood, truth: Truth, context: list[int], continuation: list[int]) -> None:
    logprob, is_greedy = expected(truth, context, continuation)
    assert found.logprob == pytest.approx(logprob, abs=1e-4)
    assert (found.num_tokens, found.is_greedy) == (len(continuation), is_greedy)
    assert sum(found.token_logprobs) == pytest.approx(found.logprob)


def random_pairs(num_pairs: int) -> list[tuple[list[int], list[int]]]:
    """Few contexts, shared by many; continuations of one to seven tokens, and of more than a chunk."""
    rng = random.Random(4)
    contexts = [
        [rng.randrange(3, 500) for _ in range(length)] for length in (1, 15, 16, 17, 40, 61)
    ]
    lengths = [1, 2, 3, 7, 30]
    return [
        (rng.choice(contexts), [rng.randrange(3, 500) for _ in range(lengths[i % 5])])
        for i in range(num_pairs)
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_it_is_the_sum_of_the_continuations_log_probabilities(
    folders: dict[str, Path], truth: Truth, overlap: bool
) -> None:
    """With chunks, shared prefixes and more than fits at once."""
    pairs = random_pairs(40)
    with Engine(config(folders[NAME], async_scheduling=overlap)) as engine:
        for found, pair in zip(engine.loglikelihood(pairs), pairs, strict=True):
            check(found, truth, *pair)
        stats = engine.stats()
    assert stats.decode_tokens == 0, "no token is generated"
    assert stats.cached_tokens > 300


def test_what_greedy_generation_gives_is_greedy(small: Engine) -> None:
    prompt = [5, 6, 7, 8]
    (completion,) = small.generate(
        [prompt], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    )
    other = [*completion.token_ids[:-1], (completion.token_ids[-1] + 1) % 500]
    found = small.loglikelihood(
        [(prompt, completion.token_ids), (prompt, other), (prompt, other[:4])]
    )
    assert [each.is_greedy for each in found] == [True, False, True]


@pytest.mark.parametrize(
    ("context", "continuation", "first", "whole"),
    [
        ("The quick", " brown", "The quick", "The quick brown"),
        ("The quick ", "brown", "The quick", "The quick brown"),
        ("The quick \n ", "brown fox", "The quick", "The quick \n brown fox"),
        ("Œuvre 日", "本 é", "Œuvre 日", "Œuvre 日本 é"),
    ],
)
def test_texts_are_split_as_the_harness_does_it(
    small: Engine, truth: Truth, context: str, continuation: str, first: str, whole: str
) -> None:
    """Tokenized as one, with a context's last spaces in the continuation."""
    (found,) = small.loglikelihood([(context, continuation)])
    length = len(encoded(first))
    check(found, truth, encoded(whole)[:length], encoded(whole)[length:])


@pytest.mark.parametrize("context", ["", "  "])
def test_an_empty_context_is_the_token_that_ends_texts_where_none_begins_them(
    small: Engine, truth: Truth, context: str
) -> None:
    (found,) = small.loglikelihood([(context, "brown fox")])
    check(found, truth, [TOKENIZER.eos_token_id], encoded(context + "brown fox"))
    assert small.loglikelihood([([], encoded("brown fox"))])[0].num_tokens == len(
        encoded("brown fox")
    )
    (given,) = small.loglikelihood([("", "<|im_end|>brown fox")])
    assert given == small.loglikelihood([("", "brown fox")])[0], "it is not put there twice"


@pytest.mark.parametrize(
    ("pair", "error", "message"),
    [
        (("a", [5]), InvalidPrompt, "pair 1: .*got str and list"),
        (("a", "b", "c"), InvalidRequest, "pair 1 must be a context and a continuation"),
        (([5], [512]), InvalidPrompt, "512 is outside"),
        (([5] * 151, [6]), PromptTooLong, "takes 151"),
        (("a " * 100_000, "b"), PromptTooLong, "characters"),
    ],
)
def test_a_bad_pair_is_named(
    small: Engine, pair: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        small.loglikelihood([("a", " b"), pair])
    assert not small.has_unfinished


def test_logits_that_are_no_numbers_fail_that_pair(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(config(folders[NAME])) as engine:
        runner = engine._live_runner
        logits = type(runner.model).logits

        def broken(model: Any, hidden: Tensor) -> Tensor:
            return logits(model, hidden) * torch.nan

        monkeypatch.setattr(type(runner.model), "logits", broken)
        with pytest.raises(ScoringFailed, match=r"pair 0 has no log-likelihood.*no finite numbers"):
            engine.loglikelihood([([5], [6])])
        assert not engine.has_unfinished
        assert engine.stats().free_blocks == engine.stats().num_blocks
