"""Where decode steps run from graphs, the places of a backlog are given together, and nobody waits long."""

from __future__ import annotations

import random

import pytest

from engine.schedule.admission import MAX_HELD_STEPS
from engine.schedule.sequence import SequenceStatus
from tests.engine.shadow import ShadowEngine

pytestmark = pytest.mark.parametrize("overlap", [False, True])
NUM_SLOTS = 40


def full(*, overlap: bool, batches: bool = True, num_waiting: int = 40, max_tokens: int = 90) -> ShadowEngine:
    """All slots held by sequences of lane 1 that end at different times, and more that wait."""
    shadow = ShadowEngine(
        overlap=overlap, batches_admissions=batches, num_blocks=500, max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=400, max_model_len=120,
    )  # fmt: skip
    shadow.device.next_token = lambda token_ids: 1 + sum(token_ids) % 2  # type: ignore[method-assign]
    rng = random.Random(1)
    for _ in range(NUM_SLOTS + num_waiting):
        prompt = [
            3 + len(shadow.unfinished),
            *(rng.randrange(1, 3) for _ in range(4)),
        ]
        shadow.add(prompt, lane=1, max_tokens=rng.randrange(3, max_tokens))
    return shadow


def share_of_mixed_steps(shadow: ShadowEngine) -> float:
    """Of a drain, up to where nobody waits any more."""
    num_steps = num_mixed = 0
    while shadow.scheduler.num_waiting:
        num_mixed += bool(shadow.step().prefills)
        num_steps += 1
    shadow.drain()
    return num_mixed / num_steps


def test_a_backlog_makes_few_steps_mixed(overlap: bool) -> None:
    """Less than half as many; the first sequences are admitted at once."""
    plain = share_of_mixed_steps(full(overlap=overlap, batches=False))
    shadow = full(overlap=overlap)
    assert len(shadow.step().prefills) == NUM_SLOTS
    assert share_of_mixed_steps(shadow) < 0.5 * plain


def test_an_urgent_sequence_is_in_the_next_step(overlap: bool) -> None:
    """Held places are its own to take, also where nobody less urgent runs."""
    shadow = full(overlap=overlap)
    for _ in range(3):
        shadow.step()
    while not shadow.scheduler.slots.num_free:
        shadow.step()
    assert shadow.scheduler._gate.holds(1)
    urgent = shadow.add([1, 2, 1], lane=0)
    assert urgent in shadow.step().seqs
    shadow.drain()


def test_nobody_waits_longer_than_so_many_steps_for_a_place_that_is_free(overlap: bool) -> None:
    """Where nobody else leaves: sixteen steps, then it is taken."""
    shadow = full(overlap=overlap, num_waiting=3, max_tokens=4)
    for seq in shadow.unfinished[:NUM_SLOTS]:
        seq.max_len = 100
    shadow.step()
    shadow.step()
    shadow.abort(shadow.unfinished[0])
    held = 0
    while shadow.scheduler.slots.num_free:
        shadow.step()
        held += 1
    assert MAX_HELD_STEPS - 3 <= held <= MAX_HELD_STEPS + 1
    shadow.drain()


def test_one_who_finds_room_is_admitted_at_once(overlap: bool) -> None:
    """There is no backlog: whatever ended before, the gate was never closed, or has opened."""
    shadow = full(overlap=overlap, num_waiting=0)
    shadow.step()
    while len(shadow.scheduler.running) > NUM_SLOTS // 2:
        shadow.step()
    late = shadow.add([1, 2, 1], lane=1)
    assert late in shadow.step().seqs
    assert late.status is SequenceStatus.RUNNING
    shadow.drain()
