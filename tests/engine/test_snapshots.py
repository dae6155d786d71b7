"""States of sequences and their snapshots: never leaked, never shared, and found only where they belong."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule.snapshots import NO_ROW, Snapshots
from tests.engine.shadow import ShadowEngine
from tests.engine.test_histories import HISTORIES, SIZES, THOROUGH, Operation, Rule, play
from tests.examples import examples

BLOCK = 4
PREFIX = [1, 2, 2, 1] * 3


@THOROUGH
@given(HISTORIES, SIZES, st.sampled_from([0, 1, 2, 9]))
def test_histories_with_states(
    history: list[Operation], sizes: dict[str, Any], num_snapshots: int
) -> None:
    """Preempted, withdrawn, aborted at any step: each row is computed from the state of all before it."""
    shadow = play(history, sizes, num_snapshots=num_snapshots)
    assert num_snapshots or not shadow.scheduler.cached_tokens


@settings(THOROUGH, max_examples=examples(50))
@given(HISTORIES, SIZES)
def test_histories_with_states_and_forced_tokens(
    history: list[Operation], sizes: dict[str, Any]
) -> None:
    """A state has no way back: where a sampled token is dropped, the sequence is computed anew."""
    play(history, sizes, num_snapshots=3, make_forcing=Rule)


@settings(THOROUGH, max_examples=examples(40))
@given(HISTORIES, SIZES)
def test_histories_with_states_and_colliding_hashes(
    history: list[Operation], sizes: dict[str, Any]
) -> None:
    play(history, sizes, num_snapshots=3, hash_block=lambda parent, tokens: 7)


@settings(THOROUGH, max_examples=examples(20))
@given(HISTORIES, SIZES)
def test_without_prefix_caching_no_snapshot_is_made(
    history: list[Operation], sizes: dict[str, Any]
) -> None:
    shadow = play(history, sizes, num_snapshots=3, enable_prefix_caching=False)
    assert len(shadow.blocks.snapshots._free) == 3


def test_the_least_recently_used_snapshot_goes_first() -> None:
    snapshots = Snapshots(10, 2)
    assert [snapshots.take(1), snapshots.take(2)] == [10, 11]
    assert snapshots.use(1) == 10
    assert snapshots.take(3) == 11
    assert (1 in snapshots, 2 in snapshots, 3 in snapshots) == (True, False, True)
    snapshots.drop([1, 2])
    assert snapshots.take(4) == 10
    assert Snapshots(10, 0).take(1) == NO_ROW


def test_a_long_prompt_is_kept_in_any_case() -> None:
    shadow = ShadowEngine(num_blocks=200, max_model_len=400, num_snapshots=1)
    for cached in (0, 256):
        seq = shadow.add([1, 2] * 129, max_tokens=2)
        shadow.drain()
        assert seq.num_cached_tokens == cached


def hits(num_snapshots: int, prompts: list[list[int]], *, at_once: bool) -> list[int | None]:
    """The cached tokens of each prompt."""
    shadow = ShadowEngine(num_blocks=60, max_num_batched_tokens=80, num_snapshots=num_snapshots)
    seqs = []
    for prompt in prompts:
        seqs.append(shadow.add(prompt, max_tokens=2))
        if not at_once:
            shadow.drain()
    shadow.drain()
    return [seq.num_cached_tokens for seq in seqs]


def test_a_prompt_is_found_up_to_its_last_full_block() -> None:
    """Its last token is computed in any case. Copies of one request share it in their own step."""
    assert hits(4, [[*PREFIX, 1]] * 3, at_once=True) == [0, 12, 12]
    assert hits(4, [[*PREFIX, 1]] * 3, at_once=False) == [0, 0, 12]
    assert hits(4, [PREFIX] * 2, at_once=True) == [0, 8]
    assert hits(0, [[*PREFIX, 1]] * 3, at_once=True) == [0, 0, 0]


def test_a_beginning_that_the_next_one_shares_is_kept_at_once() -> None:
    """Where it came unforeseen, its second use keeps it, and the third finds it."""
    prompts = [[*PREFIX, *[tail] * 9] for tail in (1, 2)]
    assert hits(4, prompts, at_once=True) == [0, 12]
    assert hits(4, [*prompts, [*PREFIX, 2, 1, 1, 1, 1]], at_once=False) == [0, 0, 12]


def test_snapshots_that_are_used_stay() -> None:
    """Of two rows, one belongs to the common beginning."""
    prompts = [[*PREFIX, *([1] * n), *([2] * 9)] for n in range(1, 6)]
    found = hits(2, prompts, at_once=False)
    assert found[2:] == [12, 12, 12]
