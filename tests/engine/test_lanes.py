"""Lanes and admission: an urgent request is in the next step, no lane starves, a backlog goes together."""

import random

import pytest

from engine.schedule.lanes import MAX_HELD_STEPS
from engine.schedule.scheduler import MAX_OVERTAKES
from tests.engine.shadow import ShadowEngine

pytestmark = pytest.mark.parametrize("overlap", [False, True])


def unending(shadow: ShadowEngine) -> None:
    """Make no sequence end before its max_tokens."""
    shadow.device.next_token = lambda token_ids: 1 + sum(token_ids) % 2  # type: ignore[method-assign]


def test_an_urgent_sequence_takes_a_slot_from_the_latest_bulk_one(overlap: bool) -> None:
    """All slots are held by lane 1: the next step holds lane 0, and the latest of lane 1 waits."""
    shadow = ShadowEngine(overlap=overlap, max_num_seqs=3, num_blocks=40)
    unending(shadow)
    bulk = [shadow.add([1, 2, i % 2 + 1], lane=1, max_tokens=20) for i in range(3)]
    for _ in range(3):
        shadow.step()
    urgent = shadow.add([2, 2, 1], lane=0)
    assert urgent in shadow.step().seqs
    assert list(shadow.scheduler.running) == [urgent, bulk[0], bulk[1]]
    shadow.drain()


def test_a_sequence_that_is_held_and_queued_again_keeps_its_place(overlap: bool) -> None:
    shadow = ShadowEngine(overlap=overlap, max_num_seqs=1, num_blocks=40)
    unending(shadow)
    first, *later = [shadow.add([1, 2, i % 2 + 1], lane=1, max_tokens=4) for i in range(3)]
    arrived_at = first.arrived_at
    shadow.scheduler.hold(first)
    shadow.scheduler.add(first)
    assert list(shadow.scheduler.waiting[1]) == [first, *later]
    assert first.arrived_at == arrived_at
    shadow.drain()


def test_an_urgent_sequence_takes_the_blocks_of_bulk_ones(overlap: bool) -> None:
    """Slots are free: from the next step on it is in every one until it is done."""
    shadow = ShadowEngine(
        overlap=overlap, max_num_seqs=8, num_blocks=12, max_num_batched_tokens=100
    )
    unending(shadow)
    bulk = [shadow.add([1, 2, i % 2 + 1] * 4, lane=1, max_tokens=20) for i in range(4)]
    for _ in range(3):
        shadow.step()
    preempted = shadow.scheduler.num_preemptions
    urgent = shadow.add([2, 2, 1] * 4, lane=0, max_tokens=9)
    assert all(urgent in shadow.step().seqs for _ in range(9))
    assert shadow.scheduler.num_preemptions > preempted
    assert any(seq in shadow.unfinished for seq in bulk)
    shadow.drain()


def test_a_sequence_is_told_as_started_in_its_first_step_alone(overlap: bool) -> None:
    """Also one that is preempted and scheduled again; and none before it leaves the queue."""
    shadow = ShadowEngine(overlap=overlap, max_num_seqs=2, num_blocks=40)
    unending(shadow)
    seqs = [shadow.add([7 + i, 2, i % 2 + 1], lane=1, max_tokens=8) for i in range(3)]
    shadow.step()
    assert shadow.scheduler.first_scheduled == [seq.request_id for seq in seqs[:2]]
    urgent = shadow.add([2, 2, 1], lane=0, max_tokens=4)
    while shadow.unfinished:
        shadow.step()
    assert shadow.scheduler.num_preemptions > 0
    in_order = [*seqs[:2], urgent, seqs[2]]
    assert shadow.scheduler.first_scheduled == [seq.request_id for seq in in_order]


def test_sequences_of_one_lane_are_admitted_in_order(overlap: bool) -> None:
    """First in, first out within a lane, also when a later one would fit and the first does not yet."""
    shadow = ShadowEngine(
        overlap=overlap, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=100
    )
    seqs = [shadow.add([1 + i % 2] * n, max_tokens=3) for i, n in enumerate((20, 25, 3, 30, 2, 9))]
    shadow.drain()
    first_admissions = sorted(set(shadow.admitted), key=shadow.admitted.index)
    assert first_admissions == seqs


def test_a_waiting_lane_gets_one_admission_in_twenty(overlap: bool) -> None:
    """Urgent sequences wait in any number: each run of twenty admissions holds one of the bulk lane."""
    shadow = ShadowEngine(
        overlap=overlap, num_blocks=100, max_num_seqs=4, max_num_batched_tokens=200
    )
    bulk = {shadow.add([2, 2, 1, 2], lane=1, max_tokens=2) for _ in range(10)}
    for _ in range(300):
        shadow.add([1, 2], lane=0, max_tokens=2)
    while any(seq in shadow.unfinished for seq in bulk):
        shadow.step()
    places = [i for i, seq in enumerate(shadow.admitted) if seq in bulk]
    gaps = [after - before for before, after in zip([-1, *places], places, strict=False)]
    assert max(gaps) <= MAX_OVERTAKES + 1
    shadow.drain()


def test_bulk_sequences_finish_under_an_endless_urgent_flood(overlap: bool) -> None:
    """Urgent arrivals in bursts take slots and blocks again and again; the bulk ones end all the same."""
    shadow = ShadowEngine(overlap=overlap, num_blocks=14, max_num_seqs=3, max_num_batched_tokens=20)
    unending(shadow)
    bulk = [shadow.add([2] * 18, lane=1, max_tokens=20) for _ in range(3)]
    bulk += [shadow.add([1, 2] * 12, lane=2, max_tokens=12)]
    steps = 0
    while any(seq in shadow.unfinished for seq in bulk):
        if steps % 3 == 0:
            for _ in range(3):
                shadow.add([1] * 9, lane=0, max_tokens=4)
        shadow.step()
        steps += 1
        assert steps < 3000
    assert shadow.scheduler.num_preemptions > 0
    shadow.drain()


NUM_SLOTS = 40


def full(
    *, overlap: bool, batches: bool = True, num_waiting: int = 40, max_tokens: int = 90
) -> ShadowEngine:
    """All slots held by sequences of lane 1 that end at different times, and more that wait."""
    shadow = ShadowEngine(
        overlap=overlap, batches_admissions=batches, num_blocks=500, max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=400, max_model_len=120,
    )  # fmt: skip
    shadow.device.next_token = lambda token_ids: 1 + sum(token_ids) % 2  # type: ignore[method-assign]
    rng = random.Random(1)
    for _ in range(NUM_SLOTS + num_waiting):
        prompt = [3 + len(shadow.unfinished), *(rng.randrange(1, 3) for _ in range(4))]
        shadow.add(prompt, lane=1, max_tokens=rng.randrange(3, max_tokens))
    return shadow


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
