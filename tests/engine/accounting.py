"""Whether the blocks of a pool are counted right: none leaked, none freed twice, none found wrongly."""

from collections import Counter
from collections.abc import Iterable

from engine.schedule.block_manager import BlockManager
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence


def check_accounting(scheduler: Scheduler) -> None:
    check_blocks(scheduler.blocks, scheduler.running)
    snapshots = scheduler.blocks.snapshots
    if snapshots is not None:
        rows = sorted([*snapshots._free, *snapshots._rows.values()])
        assert rows == list(snapshots.rows), "a snapshot is lost, or has two owners"
        found = {block.content_id for block in scheduler.blocks._by_hash.values()}
        assert found.issuperset(snapshots._rows), "nobody can find it"


def check_blocks(blocks: BlockManager, sequences: Iterable[Sequence]) -> None:
    """sequences: all that hold blocks."""
    in_tables = Counter(block_id for seq in sequences for block_id in seq.block_table)
    for block in blocks._blocks:
        assert block.ref_count == in_tables[block.block_id], f"block {block.block_id}"
        assert (block.block_id in blocks._free) == (block.ref_count == 0), f"block {block.block_id}"
    for block_hash, block in blocks._by_hash.items():
        assert block.hash == block_hash, f"block {block.block_id} lost its hash"
    for parent, entries in blocks._tails._behind.items():
        for tokens, block_id in entries:
            block = blocks._blocks[block_id]
            assert (block.is_listed, block.parent_content_id, block.tokens) == (
                True,
                parent,
                tokens,
            )
