"""The block manager's rules one by one; test_histories.py checks them in random histories."""

from engine import SamplingParams
from engine.schedule.block_manager import BlockManager
from engine.schedule.sequence import Sequence


def sequence(token_ids: list[int]) -> Sequence:
    return Sequence("r", token_ids, SamplingParams())


def compute(blocks: BlockManager, token_ids: list[int]) -> Sequence:
    """A sequence whose tokens have all been computed in one step."""
    seq = sequence(token_ids)
    blocks.extend_keys(seq)
    blocks.allocate(seq, blocks.find_cached(seq))
    blocks.publish(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    return seq


def num_cached(blocks: BlockManager, token_ids: list[int]) -> int:
    seq = sequence(token_ids)
    blocks.extend_keys(seq)
    return len(blocks.find_cached(seq))


def test_a_block_can_be_hit_in_the_step_that_computes_it() -> None:
    """Sequences of one step share a prefix."""
    blocks = BlockManager(8, 4)
    first = sequence(list(range(9)))
    blocks.extend_keys(first)
    blocks.allocate(first, [])
    blocks.publish(first, 9)
    assert num_cached(blocks, list(range(9))) == 2


def test_least_recently_used_blocks_are_taken_first() -> None:
    """Released prefixes stay until blocks are needed; the oldest goes first, its end before its start."""
    blocks = BlockManager(6, 2)
    old = compute(blocks, [1, 2, 3, 4])
    new = compute(blocks, [5, 6, 7, 8])
    blocks.release(old)
    blocks.release(new)
    compute(blocks, [9, 9, 8, 8, 7, 7])
    assert num_cached(blocks, [1, 2, 3, 4, 0]) == 1
    assert num_cached(blocks, [5, 6, 7, 8, 0]) == 2
