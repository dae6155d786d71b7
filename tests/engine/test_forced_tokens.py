"""Tokens that a sequence must take, whatever is sampled: in every history, and with every step in flight."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from tests.engine.shadow import NUM_TOKENS
from tests.engine.test_histories import HISTORIES, SIZES, THOROUGH, Operation, play


class Rule:
    """Forces up to four tokens now and then, also at the beginning, by all tokens before them."""

    def __init__(self, prompt: list[int]) -> None:
        self._token_ids = list(prompt)

    def first(self) -> list[int]:
        draw = hash((len(self._token_ids), *self._token_ids)) >> 5
        if draw % 3:
            return []
        # 0, which ends a sequence, is seldom one of them
        return [1 + (draw >> place) % (NUM_TOKENS - 1) if draw % 37 else 0 for place in range(draw % 5)]

    def after(self, token_id: int) -> list[int]:
        self._token_ids.append(token_id)
        return self.first() if token_id == 1 else []


@settings(THOROUGH, max_examples=300)
@given(HISTORIES, SIZES)
def test_forced_tokens_stand_where_they_must_in_every_history(
    history: list[Operation], sizes: dict[str, Any]
) -> None:
    """Preempted, withdrawn, in chunks, with a step in flight: the same tokens, right keys and values."""
    play(history, sizes, make_forcing=Rule)


def test_the_histories_reach_what_they_should() -> None:
    """Samples that are dropped, forced ends and preemptions all occur, or the above would prove little."""
    seen = {"preemptions": 0, "forced at first": 0, "fewer samples than tokens": 0}

    @settings(THOROUGH, max_examples=60)
    @given(HISTORIES, SIZES.map(lambda sizes: sizes | {"overlap": True}))
    def histories(history: list[Operation], sizes: dict[str, Any]) -> None:
        shadow = play(history, sizes, make_forcing=Rule)
        seen["preemptions"] += shadow.scheduler.num_preemptions > 0
        seen["forced at first"] += any(
            Rule(seq.token_ids[: seq.num_prompt_tokens]).first() for seq in shadow.finished
        )
        generated = sum(len(seq.generated_token_ids) for seq in shadow.finished)
        seen["fewer samples than tokens"] += shadow.scheduler.decode_tokens < generated - len(shadow.finished)

    histories()
    assert min(seen.values()) > 10, seen
