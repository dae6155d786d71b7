"""Penalties, biases, allowed tokens and bad words: what they do to logits, and so to completions."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine import Engine, EngineConfig, SamplingParams
from engine.sampling.edit_logits import edit_logits
from engine.sampling.logit_edits import EditParts, RequestEdits, SequenceEdits, token_mask
from tests.engine.checkpoints import SHAPES, make_tokenizer, pool_bytes
from tests.engine.reference import TIE, Reference
from tests.examples import examples

VOCAB = 70  # more than two words of a mask, and no multiple of them
FEW = 6  # tokens of which completions are made, so that they repeat

Words = list[tuple[int, ...]]


def edited(
    logits: Tensor, params: SamplingParams, words: Words, prompt: list[int], generated: list[int]
) -> Tensor:
    """Logits [vocabulary] as transformers' processors change them, in vLLM's order; what it has none for is
    computed directly."""
    ids, scores = torch.tensor([prompt + generated]), logits.float()[None].clone()
    if params.allowed_token_ids is not None:
        banned = sorted(set(range(scores.shape[1])) - set(params.allowed_token_ids))
        scores[:, banned] = -torch.inf
    if words:
        own = torch.tensor([generated], dtype=torch.int64)
        scores = NoBadWordsLogitsProcessor([list(word) for word in words])(own, scores)
    if params.logit_bias:
        biases = {(token_id,): float(bias) for token_id, bias in params.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)
    count = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=scores.shape[1])
    return scores[0] - params.frequency_penalty * count - params.presence_penalty * (count > 0)


@dataclass(frozen=True)
class Row:
    """A row of logits, and what comes before its token."""

    params: SamplingParams
    words: Words
    prompt: list[int]
    generated: list[int]
    is_pending: bool
    num_seen: int  # of the generated ones when its edits were made for the first time

    def write(self, parts: EditParts, place: int, pending_sample: int) -> bool:
        """Write its edits, as after some steps; whether it has any."""
        request = RequestEdits.of(self.params, self.prompt, VOCAB, self.words)
        if request is None:
            return False
        edits, start = SequenceEdits(request), len(self.prompt)
        known = self.prompt + self.generated[: len(self.generated) - self.is_pending]
        edits.write(
            EditParts(), 0, known[: start + self.num_seen], start, 0 if self.is_pending else None
        )
        edits.write(parts, place, known, start, pending_sample if self.is_pending else None)
        return True


def edit_rows(logits: Tensor, rows: list[Row]) -> Tensor:
    """The rows' logits [rows, vocabulary], edited as in one step; those before it were sampled in reverse."""
    parts, places = EditParts(), []
    for number, row in enumerate(rows):
        if row.write(parts, len(places), number):
            places.append(number)
    if not places:
        return logits
    last = torch.tensor([row.generated[-1] if row.generated else -1 for row in rows])
    at = np.arange(len(rows))[::-1].copy()
    edits = parts.joined(np.array(places))
    return edit_logits(logits, edits.placed(edits.rows, at[edits.pending[:, 1]]), last[at])


PENALTIES = st.sampled_from([0.0, 0.0, -1.5, 0.3, 2.0])
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.4, 1.7]),
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16)),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1),
)
TOKENS = st.integers(0, FEW - 1)


@st.composite
def row_strategy(draw: st.DrawFn) -> Row:
    generated = draw(st.lists(TOKENS, max_size=12))
    is_pending = bool(generated) and draw(st.booleans())
    return Row(
        params=draw(PARAMS),
        words=draw(st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=5)),
        prompt=draw(st.lists(st.integers(0, VOCAB - 1) | TOKENS, min_size=1, max_size=9)),
        generated=generated,
        is_pending=is_pending,
        num_seen=draw(st.integers(0, len(generated) - is_pending)),
    )


@given(rows=st.lists(row_strategy(), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_every_row_gets_its_own_edits_whatever_its_neighbours_are(
    rows: list[Row], seed: int
) -> None:
    """As transformers' processors make them; and to the bit the same as alone, in bfloat16 too."""
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    together = edit_rows(logits.clone(), rows)
    for row, own, result in zip(rows, logits, together, strict=True):
        expected = edited(own, row.params, row.words, row.prompt, row.generated)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(edit_rows(own[None].clone(), [row])[0], result)
    short = logits.bfloat16()
    together = edit_rows(short.clone(), rows)
    for row, own, result in zip(rows, short, together, strict=True):
        assert torch.equal(edit_rows(own[None].clone(), [row])[0].float(), result.float())


def test_a_mask_has_a_bit_for_each_token() -> None:
    """The lowest first, as structured output's masks have them; every bit of a word, its sign too."""
    mask = token_mask([0, 31, 33, 63, 69], VOCAB)
    assert mask.dtype == np.int32
    assert mask.tolist() == [1 - 2**31, 2 - 2**31, 1 << 5]
    parts = EditParts()
    parts.allow(0, mask)
    parts.allow(1, mask)
    edits = parts.joined(np.array([0, 2]))
    assert len(edits.token_masks) == 1, "rows of one mask share it"
    logits = edit_logits(torch.zeros(3, VOCAB), edits)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 31, 33, 63, 69]
    assert torch.equal(logits[0], logits[2])
    assert logits[1].isfinite().all()


# In an engine

SHAPE = next(shape for shape in SHAPES if shape.name == "gqa2_tied_hub")
GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
MIXES: list[dict[str, Any]] = [
    {}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.8},  {"logit_bias": {11: 9.0, 12: 8.5, 13: -100}},
    {"allowed_token_ids": range(3, 500, 17)},
    {"bad_words": ["e", "in", " the", "at a", "quick brown fox"]},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
     "logit_bias": {"17": 4, "18": 4.5}, "allowed_token_ids": range(0, 512, 2), "bad_words": ["o", "10"]},
]  # fmt: skip


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 60 tokens, some with a common prefix, each with other values."""
    rng = random.Random(3)
    prefix = [rng.randrange(3, 500) for _ in range(20)]
    return [
        (
            prefix * (i % 2) + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))],
            replace(GREEDY, max_tokens=8 + i % 7, **MIXES[i % len(MIXES)]),
        )
        for i in range(2 * len(MIXES))
    ]


def words_of(params: SamplingParams) -> Words:
    """As a word is at the beginning of a text, and behind a space."""
    encode = make_tokenizer().encode
    return [
        tuple(encode(text))
        for word in params.bad_words or ()
        for text in (word, " " + word.lstrip())
    ]


@pytest.fixture(scope="module")
def built(folders: dict[str, Path]) -> Iterator[Engine]:
    config = EngineConfig(
        str(folders[SHAPE.name]), dtype="float32", max_model_len=96, kv_cache_bytes=pool_bytes(SHAPE, 400),
        attention_backend="torch",
    )  # fmt: skip
    with Engine(config) as engine:
        yield engine


def test_completions_are_those_of_the_processors(built: Engine, folders: dict[str, Path]) -> None:
    """Each token is the best of the reference's edited logits, or ties with it."""
    reference = Reference(folders[SHAPE.name])
    asked = requests()
    completions = built.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert {completion.finish_reason for completion in completions} == {"length"}
    for (prompt, params), completion in zip(asked, completions, strict=True):
        words, token_ids = words_of(params), completion.token_ids
        for i, token_id in enumerate(token_ids):
            logits = reference.logits(prompt + token_ids[:i])
            scores = edited(logits, params, words, prompt, token_ids[:i])
            assert scores[token_id] >= scores.max() - TIE, (params, i)


def test_bans_for_min_tokens_come_on_top(built: Engine) -> None:
    """One end token and one other are allowed: the other until the end may come, then the end."""
    params = SamplingParams(
        max_tokens=9, min_tokens=4, temperature=0.0, stop_token_ids=(60,), allowed_token_ids=(60, 61),
        logit_bias={60: 100},
    )  # fmt: skip
    (completion,) = built.generate([[5, 6, 7]], params)
    assert completion.token_ids == [61] * 4 + [60]
    assert completion.finish_reason == "stop"


def test_a_request_that_leaves_no_token_fails_alone(built: Engine) -> None:
    """Its only allowed token is banned; a neighbour goes on."""
    end = SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=(60,), allowed_token_ids=(60,))
    alone, failed = built.generate([[5, 6]] * 2, [GREEDY, end])
    assert failed.finish_reason == "error"
    assert "no token could be chosen" in (failed.error or "")
    assert alone.token_ids == built.generate([[5, 6]], GREEDY)[0].token_ids
