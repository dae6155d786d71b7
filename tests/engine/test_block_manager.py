"""The block manager's rules one by one; test_histories.py checks them in random histories."""

import pytest

from engine import ConfigError, SamplingParams
from engine.schedule.block_manager import Block, BlockCopy, BlockManager, Tail
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence
from tests.engine.accounting import check_blocks


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


def admit(blocks: BlockManager, token_ids: list[int]) -> tuple[Sequence, BlockCopy | None, list[Block]]:
    """As `compute`, with what may be copied, and what was published."""
    seq = sequence(token_ids)
    blocks.extend_keys(seq)
    cached = blocks.find_cached(seq)
    copy = blocks.allocate(seq, cached, blocks.find_tail(seq, cached))
    published = blocks.publish(seq, seq.num_tokens) + blocks.publish_tail(seq)
    return seq, copy, published


def in_a_step(blocks: BlockManager, *prompts: list[int]) -> list[tuple[Sequence, BlockCopy | None]]:
    admitted = [admit(blocks, prompt) for prompt in prompts]
    blocks.let_go_sources(copy for _, copy, _ in admitted if copy)
    for _, _, published in admitted:
        blocks.launched(published)
    return [(seq, copy) for seq, copy, _ in admitted]


def test_a_hit_may_end_inside_a_block() -> None:
    """Of a full block, and of a prompt's last one; the longest that is shared, short of the last token."""
    blocks = BlockManager(20, 4)
    (first, _), (second, _) = in_a_step(blocks, [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9, 9, 9])
    for prompt, source, num_tokens, num_computed in (
        ([1, 2, 3, 4, 5, 6, 8], first.block_table[1], 2, 6),
        ([1, 2, 3, 4, 5, 6, 7], first.block_table[1], 2, 6),
        ([1, 2, 3, 4, 5, 9, 9, 9], second.block_table[1], 3, 7),
        ([1, 2, 3], first.block_table[0], 2, 2),
    ):
        ((seq, copy),) = in_a_step(blocks, prompt)
        assert copy == BlockCopy(source, seq.block_table[-1], num_tokens)
        assert seq.num_computed_tokens == num_computed
        blocks.release(seq)
    check_blocks(blocks, [first, second])


def test_what_a_step_computes_is_copied_once_it_is_launched() -> None:
    blocks = BlockManager(20, 4)
    _, _, published = admit(blocks, [1, 2, 3])
    assert blocks.find_tail(sequence([1, 2, 4]), []) is None
    blocks.launched(published)
    assert blocks.find_tail(sequence([1, 2, 4]), []) == Tail(0, 2)


def test_a_block_is_kept_for_the_step_that_copies_from_it() -> None:
    """Else others might write to it, in that step or before it, and a step that is repeated copy that."""
    blocks = BlockManager(2, 4)
    ((first, _),) = in_a_step(blocks, [1, 2, 3])
    blocks.release(first)
    seq, copy, _ = admit(blocks, [1, 2, 4])
    assert copy is not None
    assert copy == BlockCopy(0, 1, 2)
    assert blocks.num_missing(sequence([9]), []) == 1
    blocks.let_go_sources([copy])
    assert blocks.num_missing(sequence([9]), []) == 0
    assert blocks.num_missing(sequence([1, 2, 5]), [], Tail(0, 2)) == 1, "there is no second one"
    check_blocks(blocks, [seq])


def test_a_withdrawn_or_recycled_tail_is_not_found() -> None:
    blocks = BlockManager(2, 4)
    ((seq, _),) = in_a_step(blocks, [1, 2, 3])
    blocks.withdraw([blocks._blocks[0]])
    blocks.release(seq)
    assert blocks.find_tail(sequence([1, 2, 3]), []) is None
    for prompt in ([1, 2, 3], [5] * 8):
        blocks.release(in_a_step(blocks, prompt)[0][0])
    assert blocks.find_tail(sequence([1, 2, 3]), []) is None
    check_blocks(blocks, [])


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


def test_a_pool_must_hold_one_longest_sequence() -> None:
    with pytest.raises(ConfigError, match="lower max_model_len or raise kv_cache_bytes"):
        Scheduler(BlockManager(4, 4), max_num_seqs=1, max_num_batched_tokens=8, max_model_len=17)
