"""Drafts: what is guessed, when it pays, and that a real model answers the same with any guesses."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import Completion, Engine, EngineConfig, EngineStats, SamplingParams
from engine.schedule.drafts import MAX_SKIPPED, MOST, PLAIN_STEPS, RETRY_STEPS, Drafts
from engine.schedule.sequence import Sequence
from engine.structured.matcher import Matcher
from tests.engine.checkpoints import SHAPES, VOCAB_SIZE, pool_bytes

TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 5, 6, 7]


def sequence(token_ids: list[int], max_tokens: int = 40) -> Sequence:
    return Sequence("a", token_ids, SamplingParams(max_tokens=max_tokens))


def choose(drafts: Drafts, seqs: list[Sequence]) -> list[list[int]]:
    return drafts.choose(seqs, (np.array(seq.token_ids, np.int32) for seq in seqs), 100)


def after(drafts: Drafts, num_steps: int, seqs: list[Sequence]) -> list[list[int]]:
    """What is chosen in the last of so many steps."""
    found = [choose(drafts, seqs) for _ in range(num_steps)]
    return found[-1]


def test_what_followed_the_same_tokens_is_guessed() -> None:
    """In the text itself, the last time; else in an answer before. Never beyond the longest the sequence may get."""
    drafts, unlike = Drafts(), sequence([50, 51, 52, 53])
    answered = sequence([1])
    for token_id in (49, 51, 52, 53, 54, 55, 56):
        answered.learn(token_id)
    assert after(drafts, 2, [sequence(TEXT), unlike]) == [TEXT[3 : 3 + MOST], []]
    drafts.learn([answered])
    assert choose(drafts, [sequence(TEXT), unlike]) == [TEXT[3 : 3 + MOST], [54, 55, 56]]
    assert choose(drafts, [sequence([*TEXT, 8, 30, 5, 6, 7])])[0][:2] == [8, 30]
    assert choose(drafts, [sequence(TEXT, max_tokens=3)]) == [[8, 9]]
    assert choose(drafts, [sequence(TEXT, max_tokens=1), sequence([1, 2])]) == [[], []]


def test_tokens_are_found_whole() -> None:
    """Not at bytes that two tokens have together."""
    text = np.frombuffer(
        b"\0" + np.array([900, 901, 902], np.int32).tobytes() + b"\0\0\0", np.int32
    )
    drafts = Drafts()
    assert after(drafts, 2, [sequence([*text.tolist(), 900, 901, 902])]) == [[]]


def test_a_text_full_of_bytes_like_the_last_ones_is_given_up() -> None:
    """It holds up nobody: few places are looked at, and then nothing is guessed."""
    last = [900, 901, 902]
    alike = np.frombuffer(b"\2" + np.array(last, np.int32).tobytes() + b"\2\2\2", np.int32).tolist()
    text = [*last, 9, *alike * (MAX_SKIPPED + 1), *last]
    drafts = Drafts()
    assert after(drafts, 2, [sequence(text)]) == [[]]


def test_it_drafts_where_that_gives_more_tokens_a_second() -> None:
    """Rows that cost nothing, rows that cost as much as a step, and guesses that are never right."""
    seq = sequence(TEXT)
    free, dear = Drafts(), Drafts()
    for num_rows in range(1, 20):
        free.timed(num_rows, 1.0)
        dear.timed(num_rows, float(num_rows))
    assert after(free, 2, [seq]) == [TEXT[3 : 3 + MOST]]
    assert after(dear, 2, [seq]) == [[]]
    for num_rows in range(1, 20):
        free.timed(num_rows, 0.9 + num_rows / 10)
    for _ in range(30):
        free.count(seq, 4, 0)
    assert after(free, 2, [seq]) == [[]]


def test_a_loss_is_tried_again_and_a_gain_is_compared() -> None:
    """Each few hundred steps all guesses are computed, and of steps with guesses some have none."""
    seq, dear, free = sequence(TEXT), Drafts(), Drafts()
    for num_rows in range(1, 20):
        dear.timed(num_rows, float(num_rows))
    assert sum(choose(dear, [seq]) != [[]] for _ in range(2 * RETRY_STEPS)) == 2
    assert sum(choose(free, [seq]) == [[]] for _ in range(10 * PLAIN_STEPS)) == 10


class Known(Drafts):
    """Guesses from the answers without guesses, some tokens; by a share they are right."""

    def __init__(self, answers: list[Completion], share: float, least: int = 1) -> None:
        super().__init__()
        self.num_guesses = self.num_right = 0
        self._answers, self._share, self._least, self._random = (
            answers,
            share,
            least,
            random.Random(7),
        )

    def choose(
        self, seqs: list[Sequence], token_ids: Iterable[NDArray[np.int32]], most: int
    ) -> list[list[int]]:
        return [self._made(seq) for seq in seqs]

    def count(self, seq: Sequence, num_guesses: int, num_right: int) -> None:
        self.num_guesses += num_guesses
        self.num_right += num_right

    def _made(self, seq: Sequence) -> list[int]:
        start = len(seq.token_ids) - seq.num_prompt_tokens
        rest = self._answers[int(seq.request_id)].token_ids[
            start : start + self._random.randrange(self._least, 6)
        ]
        draws = [self._random.random() < self._share for _ in rest]
        guesses = [
            token if right else (token + 1) % VOCAB_SIZE
            for token, right in zip(rest, draws, strict=True)
        ]
        return guesses[: seq.max_len - len(seq.token_ids) - 1]


FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"name of it": {"type": "string", "maxLength": 9}, "id": {"type": "integer"}},
    "required": ["name of it", "id"],
}
MIXED: dict[int, dict[str, Any]] = {
    3: {"repetition_penalty": 1.2},
    4: {"logprobs": 1},
    **{i: {"structured_outputs": {"json": FORM}} for i in (1, 6, 8)},
    **{i: {"structured_outputs": {"regex": "(one|on two|[ab]+c?)+!"}} for i in (2, 7)},
}


def answer(config: EngineConfig, drafts: Drafts | None) -> tuple[list[Completion], EngineStats]:
    rng = random.Random(1)
    with Engine(config) as engine:
        engine._stepper.drafts = drafts
        for i in range(12):
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 60))]
            params = SamplingParams(
                max_tokens=30, temperature=(i % 3) * 0.7, seed=i, ignore_eos=i % 2 == 0
            )
            engine.add(str(i), prompt, replace(params, **MIXED.get(i, {"min_tokens": 5})))
        done: list[Completion] = []
        while engine.has_unfinished:
            done += engine.step()
        return sorted(done, key=lambda completion: int(completion.request_id)), engine.stats()


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_a_model_gives_the_same_tokens_with_any_guesses(
    folders: dict[str, Path], share: float
) -> None:
    """Bit by bit in deterministic mode: greedy and drawn, rows with a grammar, penalties or log probabilities too."""
    shape = next(shape for shape in SHAPES if shape.name == "gqa2_bias")
    config = EngineConfig(
        str(folders[shape.name]), deterministic=True, device="cpu", max_model_len=128, max_num_seqs=12,
        kv_cache_bytes=pool_bytes(shape, 40),
    )  # fmt: skip
    plain, plain_stats = answer(config, None)
    drafts = Known(plain, share)
    guessed, stats = answer(config, drafts)
    assert guessed == [
        replace(own, num_cached_tokens=each.num_cached_tokens)
        for own, each in zip(plain, guessed, strict=True)
    ]
    assert drafts.num_guesses > 20
    assert stats.generation_tokens == plain_stats.generation_tokens
    assert (drafts.num_right == 0) == (share == 0)


def small(folders: dict[str, Path]) -> Engine:
    return Engine(
        EngineConfig(
            str(folders["gqa2_bias"]), device="cpu", max_num_seqs=40, kv_cache_bytes=1 << 22
        )
    )


def test_an_answer_that_was_guessed_is_found_again(folders: dict[str, Path]) -> None:
    """All its full blocks, though steps begin and end inside of them."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with small(folders) as engine:
        plain = engine.generate([[5, 6]], params)
    with small(folders) as engine:
        engine._stepper.drafts = drafts = Known(plain, 1.0, least=5)
        assert engine.generate([[5, 6]], params)[0].token_ids == plain[0].token_ids
        assert drafts.num_right > 0
        (later,) = engine.generate(
            [[5, 6, *plain[0].token_ids[:50], 3]], SamplingParams(max_tokens=1)
        )
    assert later.num_cached_tokens >= 48


def test_guesses_end_where_a_grammar_does(folders: dict[str, Path]) -> None:
    """Before what it does not allow, and before the text's end; none are made where it may be too slow."""
    with small(folders) as engine:
        a, b, mark = (engine._tokenizer.encode_alone(text)[0] for text in "ab!")
        ends = engine._sequences.eos_token_ids
        params = SamplingParams(structured_outputs={"regex": "ab*!"})
        (matcher,) = engine._sequences.grammars.matchers(params, ends)
        assert matcher is not None
        assert matcher.num_possible([a, b, b, a]) == 3
        assert matcher.num_possible([a, mark, min(ends)]) == 2
        assert [each.must_end for each in matcher.along([a, b, mark])] == [
            False,
            False,
            False,
            True,
        ]
        assert not matcher.may_end
        matcher.is_suspect = True
        assert matcher.num_possible([a]) == 0


def test_a_grammar_that_fails_within_guesses_ends_its_row_there(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the same token as without guesses, though the masks of those after it were made before."""

    def forced(self: Matcher) -> list[int]:
        self.error = next(errors)
        return []

    params, failed = (
        SamplingParams(temperature=0.0, structured_outputs={"regex": "[ab]{30}"}),
        list[Completion](),
    )
    with small(folders) as engine:
        plain = engine.generate([[5, 6]], params)
        monkeypatch.setattr(Matcher, "forced", forced)
        for drafts in (None, Known(plain, 1.0, least=5)):
            errors = chain([None] * 6, repeat("it has failed"))
            engine._stepper.drafts = drafts
            failed += engine.generate([[5, 6]], params)
    assert [each.token_ids for each in failed] == [plain[0].token_ids[:6]] * 2
    assert failed[0].error == failed[1].error
    assert "it has failed" in str(failed[0].error)
