"""Random histories of adds, steps, failures, aborts and forced tokens keep every invariant."""

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.schedule.block_manager import hash_block
from engine.schedule.drafts import Drafts
from engine.schedule.sequence import Sequence
from tests.engine.shadow import NUM_TOKENS, ShadowDevice, ShadowEngine
from tests.examples import examples

Operation = tuple[Any, ...]


def random_history(seed: int) -> list[Operation]:
    """A history whose mix of operations is drawn too; hypothesis alone draws too few long ones."""
    rng = random.Random(seed)
    kinds = ["add", "step", "fail", "abort"]
    weights = [
        rng.uniform(0.5, 3),
        rng.uniform(0.5, 3),
        rng.choice([0, 0.1, 0.5]),
        rng.choice([0, 0.1, 0.5]),
    ]
    prefix = random_tokens(rng, rng.randrange(20))
    history: list[Operation] = []
    for kind in rng.choices(kinds, weights, k=rng.randrange(5, 40)):
        if kind == "add":
            prompt = prefix[: rng.choice([0, 0, 99, rng.randrange(20)])] + random_tokens(
                rng, rng.randrange(1, 12)
            )
            lane, max_tokens = rng.choice([0, 0, 1, 2]), rng.randrange(1, 24)
            wanted = {
                name: rng.choice([None, None, 0, 2]) for name in ("logprobs", "prompt_logprobs")
            }
            history.append((kind, prompt, lane, max_tokens, wanted))
            if len(prompt) > 1 and rng.random() < 0.3:
                history[-1] = ("score", prompt, lane, rng.randrange(1, len(prompt)))
        elif kind == "step":
            history.append((kind, rng.randrange(1, 6)))
        else:
            history.append((kind, rng.randrange(99)))
    return history


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, NUM_TOKENS) for _ in range(length)]


HISTORIES = st.integers(0, 2**32).map(random_history)
SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([10, 11, 16, 30]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([7, 12, 40]),
        "max_model_len": st.sampled_from([33, 40]),
        "overlap": st.booleans(),
        "batches_admissions": st.booleans(),
    }
)
THOROUGH = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def play(history: list[Operation], sizes: dict[str, Any], **options: Any) -> ShadowEngine:
    """Run a history on a shadow engine, which checks itself after each step, and drain it."""
    shadow = ShadowEngine(**sizes, **options)
    answers, scored = [], []
    for operation, *values in history:
        if operation == "add":
            prompt, lane, max_tokens, wanted = values
            seq = shadow.add(prompt, lane=lane, max_tokens=max_tokens, **wanted)
            answers.append((seq, prompt, max_tokens))
        elif operation == "score":
            prompt, lane, score_from = values
            scored.append((shadow.score(prompt, score_from, lane=lane), prompt, score_from))
        elif operation == "step":
            for _ in range(values[0]):
                shadow.step()
        elif operation == "fail":
            shadow.step(fails=True)
        elif shadow.unfinished:
            shadow.abort(shadow.unfinished[values[0] % len(shadow.unfinished)])
    shadow.drain()
    for seq, prompt, max_tokens in answers:
        if seq.finish_reason != "abort":
            assert seq.token_ids == expected(shadow, prompt, max_tokens)
            check_logprobs(shadow, seq)
    for seq, prompt, score_from in scored:
        if seq.finish_reason != "abort":
            assert seq.finish_reason == "stop"
            ranks = [rank for part in seq.prompt_logprobs for rank in part.ranks.tolist()]
            assert ranks == shadow.device.prefixes(prompt)[score_from - 1 : -1]
            token_ids = [
                token_id for part in seq.prompt_logprobs for token_id in part.logprobs.tolist()
            ]
            assert token_ids == prompt[score_from:]
    return shadow


def check_logprobs(shadow: ShadowEngine, seq: Sequence) -> None:
    """Each token that should be scored is, once, in order, and by the row that has all before it."""
    prefixes, length = shadow.device.prefixes(seq.token_ids), seq.num_prompt_tokens
    for parts, is_wanted, first, end in (
        (seq.prompt_logprobs, seq.params.prompt_logprobs is not None, 1, length),
        (seq.logprobs, seq.params.logprobs is not None, length, len(seq.token_ids)),
    ):
        ranks = [rank for part in parts for rank in part.ranks.tolist()]
        token_ids = [token_id for part in parts for token_id in part.logprobs.tolist()]
        assert ranks == (prefixes[first - 1 : end - 1] if is_wanted else [])
        assert token_ids == (seq.token_ids[first:end] if is_wanted else [])
    assert shadow.scheduler.slots.num_wanting == 0


def expected(shadow: ShadowEngine, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens a sequence must end with, whatever happened to it on the way."""
    token_ids, forcing = list(prompt), shadow.make_forcing(prompt)
    forced = deque(forcing.first() if forcing else ())
    for _ in range(max_tokens):
        token_ids.append(forced.popleft() if forced else shadow.device.next_token(token_ids))
        forced += forcing.after(token_ids[-1], len(forced)) if forcing else ()
        if token_ids[-1] == 0 or len(token_ids) >= shadow.scheduler.max_model_len:
            break
    return token_ids


@THOROUGH
@given(HISTORIES, SIZES)
def test_histories_with_prefix_caching(history: list[Operation], sizes: dict[str, Any]) -> None:
    """free + held = pool, references = tables, contents = prefixes, all finish with their own tokens."""
    play(history, sizes)


@settings(THOROUGH, max_examples=examples(40))
@given(HISTORIES, SIZES)
def test_histories_without_prefix_caching(history: list[Operation], sizes: dict[str, Any]) -> None:
    """The same without sharing: then no block ever has two references."""
    shadow = play(history, sizes, enable_prefix_caching=False)
    assert shadow.scheduler.cached_tokens == 0


@pytest.mark.parametrize(
    "hash_function",
    [lambda parent, tokens: 7, lambda parent, tokens: hash_block(parent, tokens) % 3],
)
def test_histories_with_colliding_hashes(hash_function: Callable[[int, bytes], int]) -> None:
    """Every hash equal, or one of three: a hit still never returns another prefix's KV."""

    @settings(THOROUGH, max_examples=examples(40))
    @given(HISTORIES, SIZES)
    def histories(history: list[Operation], sizes: dict[str, Any]) -> None:
        play(history, sizes, hash_block=hash_function)

    histories()


class Rule:
    """Forces up to four tokens now and then, also at the beginning, by all tokens before them."""

    def __init__(self, prompt: list[int]) -> None:
        self._token_ids = list(prompt)

    def first(self) -> list[int]:
        draw = hash((len(self._token_ids), *self._token_ids)) >> 5
        if draw % 3:
            return []
        # 0, which ends a sequence, is seldom one of them
        return [
            1 + (draw >> place) % (NUM_TOKENS - 1) if draw % 37 else 0 for place in range(draw % 5)
        ]

    def after(self, token_id: int, num_left: int) -> list[int]:
        self._token_ids.append(token_id)
        return self.first() if token_id == 1 else []


@settings(THOROUGH, max_examples=examples(50))
@given(HISTORIES, SIZES)
def test_forced_tokens_stand_where_they_must_in_every_history(
    history: list[Operation], sizes: dict[str, Any]
) -> None:
    """Preempted, withdrawn, in chunks, with a step in flight: the same tokens, right keys and values."""
    play(history, sizes, make_forcing=Rule)


class Guesses(Drafts):
    """Guesses by a share that are right: 1 always, 0 never, at each place of a draft."""

    def __init__(self, device: ShadowDevice, share: float) -> None:
        super().__init__()
        self.num_right = 0
        self._device, self._share, self._random = device, share, random.Random(3)

    def choose(
        self, seqs: list[Sequence], token_ids: Iterable[NDArray[np.int32]], most: int
    ) -> list[list[int]]:
        assert all(
            seq.token_ids == known.tolist() for seq, known in zip(seqs, token_ids, strict=True)
        )
        return [
            self._made(list(seq.token_ids), min(6, seq.max_len - len(seq.token_ids) - 1))
            for seq in seqs
        ]

    def _made(self, token_ids: list[int], most: int) -> list[int]:
        num_known = len(token_ids)
        for _ in range(self._random.randrange(7) if most > 0 else 0):
            right = self._device.next_token(token_ids)
            token_ids.append(
                right if self._random.random() < self._share else (right + 1) % NUM_TOKENS
            )
        return token_ids[num_known : num_known + most]

    def count(self, seq: Sequence, num_guesses: int, num_right: int) -> None:
        assert 0 <= num_right <= num_guesses
        self.num_right += num_right


@pytest.mark.parametrize(
    ("share", "wishes"), [(0.0, {}), (0.6, {}), (1.0, {}), (0.8, {"make_forcing": Rule})]
)
def test_guesses_change_no_token_of_any_history(share: float, wishes: dict[str, Any]) -> None:
    """Adversarial, random and perfect ones; with lanes, preemption, stops, failures and aborts."""
    num_right = 0

    @settings(THOROUGH, max_examples=examples(40))
    @given(HISTORIES, SIZES)
    def histories(history: list[Operation], sizes: dict[str, Any]) -> None:
        nonlocal num_right
        shadow = play(
            history,
            sizes | {"overlap": False},
            make_drafts=lambda device: Guesses(device, share),
            **wishes,
        )
        assert isinstance(shadow.drafts, Guesses)
        num_right += shadow.drafts.num_right

    histories()
    assert (num_right > 0) == (share > 0)
