"""BlockManager: owner of the KV pool's blocks, their reference counts and the prefix cache.

A full block is found again by the hash of its whole prefix. A hit also compares (id of the parent's content, own
tokens), and ids are never used again: no collision or recycled block can return another prefix.

A block is published when the step that computes it is scheduled, because every layer stores keys and values
before it attends: sequences of one step share a prefix. `withdraw` takes it back if the step has not run.

Behind a sequence's cached blocks, a few more tokens may be copied from a block that begins with them (`Tails`), if an
earlier step has computed that block. The block is held until the step that copies from it is launched.
"""

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, islice
from struct import Struct

import xxhash

from engine.errors import OutOfBlocks
from engine.schedule.prepared_prompt import ROOT, BlockKey
from engine.schedule.sequence import Sequence
from engine.schedule.snapshots import NO_ROW, Snapshots, StateMoves

TOKEN_BYTES = 4


class Tails:
    """Blocks by the content before them. Blocks behind the same content are sorted by the bytes of their tokens.

    So the block that shares the most first tokens with given ones is next to the place where these would be inserted.
    """

    def __init__(self) -> None:
        self._behind: dict[int, list[tuple[bytes, int]]] = {}

    def add(self, parent: int, tokens: bytes, block_id: int) -> None:
        """Note that a block behind the content `parent` begins with these tokens."""
        insort(self._behind.setdefault(parent, []), (tokens, block_id))

    def remove(self, parent: int, tokens: bytes, block_id: int) -> None:
        """Remove what `add` has noted."""
        entries = self._behind[parent]
        del entries[bisect_left(entries, (tokens, block_id))]
        if not entries:
            del self._behind[parent]

    def find(self, parent: int, tokens: bytes) -> tuple[int, int]:
        """Return the block that shares the most first tokens with these, and how many; (-1, 0) for none."""
        entries = self._behind.get(parent, [])
        place = bisect_left(entries, (tokens,))
        near = entries[max(0, place - 1) : place + 1]
        shared = [(num_shared(other, tokens), block_id) for other, block_id in near]
        num_tokens, block_id = max(shared, default=(0, -1))
        return (block_id, num_tokens) if num_tokens else (-1, 0)


def num_shared(one: bytes, other: bytes) -> int:
    """Count the first tokens that are equal in both."""
    shortest = min(len(one), len(other))
    for start in range(0, shortest, TOKEN_BYTES):
        if one[start : start + TOKEN_BYTES] != other[start : start + TOKEN_BYTES]:
            return start // TOKEN_BYTES
    return shortest // TOKEN_BYTES


def num_equal(one: list[BlockKey], other: list[BlockKey]) -> int:
    """Count the first keys that are equal in both lists.

    A key's hash covers all tokens before it: once two keys differ, all later ones differ too. So a bisection finds the
    first difference.
    """
    shortest = min(len(one), len(other))

    def differ(index: int) -> bool:
        return one[index].hash != other[index].hash

    return bisect_left(range(shortest), True, key=differ)


LEAST_KEPT = 256  # tokens worth a snapshot: it cuts a step's rows in two, and mixers may pad each part to 64 or more
NUM_LOOKED_AT = 8  # waiting sequences that are compared
# A tail is copied if it is at least 1 / LEAST_SHARE of the tokens to be computed without it.
LEAST_SHARE = 8


@dataclass(frozen=True)
class BlockCopy:
    """A copy of a block's first keys and values into another block, which begins with the same tokens."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True)
class Tail:
    """A block whose first num_tokens tokens can be copied behind a sequence's cached blocks."""

    block_id: int
    num_tokens: int


def hash_block(parent_hash: int, tokens: bytes) -> int:
    """Return the chain hash of a block: xxh64 over the parent's hash and the block's token ids as int32 bytes."""
    return xxhash.xxh64_intdigest(parent_hash.to_bytes(8, "little") + tokens)


class Block:
    """One block of the pool.

    `content_id` names a full block's content, None until it is published. `hash` is set only while the prefix cache
    finds the block under it. `is_listed`: the block and its `tokens` are listed in Tails.
    """

    __slots__ = (
        "block_id",
        "content_id",
        "hash",
        "is_listed",
        "parent_content_id",
        "ref_count",
        "tokens",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.forget()

    def forget(self) -> None:
        """Drop the block's content."""
        self.hash: int | None = None
        self.content_id: int | None = None
        self.parent_content_id = ROOT
        self.tokens = b""
        self.is_listed = False


class BlockManager:
    """Hands out blocks and takes them back. Not thread-safe: only the scheduler calls it, except for `keys_of`.

    snapshots: for a model with states, whose cached prefix must end where a snapshot was made; else None.
    hash_block: (parent hash, token bytes) -> hash, replaceable so that tests can force collisions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_block: Callable[[int, bytes], int] = hash_block,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.snapshots = snapshots
        self._hash_block = hash_block
        self._as_int32 = Struct(f"{block_size}i").pack
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        # Free blocks in the order in which they are taken: first those without content, then by last use.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[int, Block] = {}
        self._tails = Tails()  # holds only what launched steps compute
        self._content_ids = count(ROOT + 1)

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks; many still hold a prefix that can be hit."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def keys_of(self, key_ids: list[int], root: int = ROOT) -> list[BlockKey]:
        """Return the keys of a prompt's full blocks. Any thread may call this. key_ids, root: as in Sequence."""
        keys: list[BlockKey] = []
        self._extend(keys, key_ids, root)
        return keys

    def extend_keys(self, seq: Sequence) -> None:
        """Add the missing keys of a sequence's full blocks, if it shares blocks."""
        if seq.shares_blocks:
            self._extend(seq.block_keys, seq.key_ids, seq.root)

    def _extend(self, keys: list[BlockKey], key_ids: list[int], root: int) -> None:
        """Append the keys of full blocks that `keys` lacks."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        parent_hash = keys[-1].hash if keys else root
        for start in range(len(keys) * size, len(key_ids) - size + 1, size):
            tokens = self._as_int32(*key_ids[start : start + size])
            parent_hash = self._hash_block(parent_hash, tokens)
            keys.append(BlockKey(parent_hash, tokens))

    def find_cached(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix that need not be computed."""
        block_ids = self._find_blocks(seq)
        while block_ids and not self._may_follow(seq, block_ids):
            block_ids.pop()
        return block_ids

    def _may_follow(self, seq: Sequence, block_ids: list[int]) -> bool:
        """Whether a sequence can begin behind these blocks: not inside a picture, nor without a snapshot it needs."""
        if self.snapshots is not None and self._content_id(block_ids[-1]) not in self.snapshots:
            return False
        end = len(block_ids) * self.block_size
        return seq.pictures is None or seq.pictures.whole_until(end) == end

    def _find_blocks(self, seq: Sequence) -> list[int]:
        """Return the cached blocks that hold the sequence's first tokens, whether or not they have a snapshot."""
        block_ids: list[int] = []
        parent = seq.root
        for key in seq.block_keys[: seq.num_cacheable_tokens // self.block_size]:
            block = self._by_hash.get(key.hash)
            if block is None or block.parent_content_id != parent or block.tokens != key.tokens:
                break
            assert block.content_id is not None  # a block the cache finds is a published one
            parent = block.content_id
            block_ids.append(block.block_id)
        return block_ids

    def begin_states(
        self, seq: Sequence, cached: list[int], waiting: Iterable[Sequence], moves: StateMoves
    ) -> None:
        """Have a sequence that is being admitted begin at the snapshot behind `cached`; choose where to make new ones.

        A snapshot is made behind each prefix that other sequences share: cached blocks that have no snapshot yet, the
        longest prefix in common with one of the next `waiting`, and the prompt of a tree. Another is made behind the
        last full block of a long prompt or text.
        """
        assert self.snapshots is not None
        moves.sources[seq] = self.snapshots.use(self._content_id(cached[-1])) if cached else NO_ROW
        next_ones = islice(waiting, 1, 1 + NUM_LOOKED_AT)
        shared = max(
            (num_equal(seq.block_keys, other.block_keys) for other in next_ones), default=0
        )
        lengths = [n for n in (seq.num_prompt_tokens, seq.num_tokens) if n >= LEAST_KEPT]
        if seq.tree is not None:
            lengths.append(seq.tree.num_prompt_tokens)
        wanted = {len(self._find_blocks(seq)), shared}
        wanted.update((n - 1) // self.block_size for n in lengths)
        last = (seq.num_tokens - 1) // self.block_size  # its last token is computed in any case
        cuts = sorted({min(n, last) for n in wanted})
        seq.state_cuts = [n * self.block_size for n in cuts if n > len(cached)]

    def save_states(self, seq: Sequence, num_tokens: int, moves: StateMoves) -> None:
        """Note the snapshots that a step makes of a sequence.

        num_tokens: how many of its first tokens are computed after the step; the blocks that they fill are published.
        """
        assert self.snapshots is not None
        while seq.state_cuts and seq.state_cuts[0] <= num_tokens:
            end = seq.state_cuts.pop(0)
            last = end // self.block_size - 1
            if last >= seq.num_published_blocks:
                continue  # these blocks are not published: nobody else can hit them
            content_id = self._content_id(seq.block_table[last])
            found_id = self._by_hash[seq.block_keys[last].hash].content_id
            if found_id != content_id:
                continue  # the cache finds other content under this hash, so nobody could use the snapshot
            if content_id in self.snapshots:
                continue
            row = self.snapshots.take(content_id)
            if row != NO_ROW:
                moves.saves.setdefault(seq, []).append((end, row))
                moves.kept.append(content_id)

    def _content_id(self, block_id: int) -> int:
        content_id = self._blocks[block_id].content_id
        assert content_id is not None
        return content_id

    def find_tail(self, seq: Sequence, cached: list[int]) -> Tail | None:
        """Find a tail worth copying behind `cached`, the blocks of `find_cached`."""
        start = len(cached) * self.block_size
        end = min(seq.num_cacheable_tokens, start + self.block_size)
        if not self.enable_prefix_caching or end <= start or self.snapshots is not None:
            return None
        if seq.pictures is not None and len(seq.pictures.blocks):
            return None
        parent = self._blocks[cached[-1]].content_id if cached else seq.root
        assert parent is not None
        block_id, num_tokens = self._tails.find(
            parent, array("i", seq.key_ids[start:end]).tobytes()
        )
        if not num_tokens or num_tokens * LEAST_SHARE < seq.num_tokens - start:
            return None
        return Tail(block_id, num_tokens)

    def num_missing(self, seq: Sequence, cached: list[int], tail: Tail | None = None) -> int:
        """Return how many more free blocks `seq` needs than there are; 0 or less means that it fits."""
        reused = cached if tail is None else [*cached, tail.block_id]
        num_reused_free = sum(1 for block_id in reused if self._blocks[block_id].ref_count == 0)
        num_new = self.num_blocks_for(seq.num_tokens) - len(cached)
        return num_new + num_reused_free - len(self._free)

    def num_freed_by(self, seqs: Iterable[Sequence], keep: list[int]) -> int:
        """Return how many blocks would become free if all of `seqs` gave up theirs, not counting the blocks `keep`."""
        num_holders = Counter(block_id for seq in seqs for block_id in seq.block_table)
        for block_id in keep:
            del num_holders[block_id]
        return sum(
            1
            for block_id, count in num_holders.items()
            if self._blocks[block_id].ref_count == count
        )

    def allocate(
        self, seq: Sequence, cached: list[int], tail: Tail | None = None
    ) -> BlockCopy | None:
        """Give `seq` blocks for all its tokens, the first ones being `cached`; return the copy to make.

        The block that `tail` names is held until `let_go_sources`. If this raises OutOfBlocks, nothing has changed.
        """
        num_blocks = self.num_blocks_for(seq.num_tokens)
        if num_blocks >= len(self._free):
            missing = self.num_missing(seq, cached, tail)
            if missing > 0:
                raise OutOfBlocks(
                    f"{seq!r} needs {missing} more blocks than the {len(self._free)} free ones"
                )
        for block_id in cached if tail is None else [*cached, tail.block_id]:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
        seq.block_table = cached + [self._take() for _ in range(num_blocks - len(cached))]
        seq.num_published_blocks = len(cached)
        seq.num_computed_tokens = len(cached) * self.block_size
        if tail is None:
            return None
        seq.num_computed_tokens += tail.num_tokens
        return BlockCopy(tail.block_id, seq.block_table[len(cached)], tail.num_tokens)

    def launched(self, published: Iterable[Block]) -> None:
        """Let the first tokens of these blocks be copied: the step that computes them is launched."""
        for block in published:
            # Without a hash of its own, a published block has content that the cache finds in another block.
            is_copy = block.content_id is not None and block.hash is None
            if not block.is_listed and not is_copy:
                self._tails.add(block.parent_content_id, block.tokens, block.block_id)
                block.is_listed = True

    def let_go_sources(self, copies: Iterable[BlockCopy]) -> None:
        """Stop holding the blocks that are copied from. The step that copies them is launched, or never will be."""
        for copy in copies:
            self._let_go(self._blocks[copy.source])

    def grow(self, seq: Sequence) -> None:
        """Give `seq` one more block. Raises OutOfBlocks if none is free."""
        seq.block_table.append(self._take())

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of `seq`, the last one first: the cache then loses a text's end before its start."""
        for block_id in reversed(seq.block_table):
            block = self._blocks[block_id]
            if block.ref_count > 1:
                block.ref_count -= 1
            else:
                self._let_go(block)
        seq.block_table = []
        seq.num_published_blocks = 0
        seq.num_computed_tokens = 0

    def publish(self, seq: Sequence, num_tokens: int) -> list[Block]:
        """Add the blocks that the first `num_tokens` tokens fill to the prefix cache; return the newly added ones."""
        num_full = num_tokens // self.block_size
        if (
            not self.enable_prefix_caching
            or not seq.shares_blocks
            or num_full == seq.num_published_blocks
        ):
            return []
        self.extend_keys(seq)
        first = seq.num_published_blocks
        parent = seq.root
        if first:
            previous = self._blocks[seq.block_table[first - 1]].content_id
            assert previous is not None
            parent = previous
        published = []
        for i in range(first, num_full):
            block = self._blocks[seq.block_table[i]]
            parent = self._publish_block(block, seq.block_keys[i], parent)
            published.append(block)
        seq.num_published_blocks = num_full
        return published

    def publish_tail(self, seq: Sequence) -> list[Block]:
        """Return the last block of `seq` if it is not full and no other listed block begins with its tokens.

        `launched` lists it among the tails. Returns [] otherwise.
        """
        num_full, num_tokens = divmod(len(seq.token_ids), self.block_size)
        if (
            not self.enable_prefix_caching
            or not seq.shares_blocks
            or not num_tokens
            or self.snapshots is not None
        ):
            return []
        block = self._blocks[seq.block_table[num_full]]
        parent = self._blocks[seq.block_table[num_full - 1]].content_id if num_full else seq.root
        assert parent is not None
        tokens = array("i", seq.key_ids[-num_tokens:]).tobytes()
        if self._tails.find(parent, tokens)[1] == num_tokens:
            return []
        self._unlist(block)
        block.parent_content_id = parent
        block.tokens = tokens
        return [block]

    def withdraw(self, published: Iterable[Block]) -> None:
        """Remove from the prefix cache the blocks that one step has published, as the step has not run.

        The sequences of that step must be released too, and those of all later steps.
        """
        for block in published:
            self._forget(block)

    def _take(self) -> int:
        """Take the free block least worth keeping; its content can no longer be hit."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are held; preempt a sequence first")
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        self._forget(block)
        block.ref_count = 1
        return block_id

    def _let_go(self, block: Block) -> None:
        """Drop one reference. A block that becomes free is taken before all others if no cache finds its content."""
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free[block.block_id] = None
            if block.hash is None and not block.is_listed:
                block.forget()
                self._free.move_to_end(block.block_id, last=False)

    def _forget(self, block: Block) -> None:
        self._hide(block)
        self._unlist(block)
        block.forget()

    def _hide(self, block: Block) -> None:
        """Take the block, and the snapshot of the state behind it, out of the prefix cache."""
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash = None
            if self.snapshots is not None:
                self.snapshots.drop([self._content_id(block.block_id)])

    def _unlist(self, block: Block) -> None:
        if block.is_listed:
            self._tails.remove(block.parent_content_id, block.tokens, block.block_id)
            block.is_listed = False

    def _publish_block(self, block: Block, key: BlockKey, parent: int) -> int:
        """Give a full block its content id, and return the id.

        If another block's content has the same hash, the cache finds this block from now on and not that one.
        """
        owner = self._by_hash.get(key.hash)
        self._unlist(block)
        block.parent_content_id = parent
        block.tokens = key.tokens
        if owner is not None and owner.parent_content_id == parent and owner.tokens == key.tokens:
            block.content_id = owner.content_id
        else:
            if owner is not None:
                self._hide(owner)
            block.content_id = next(self._content_ids)
            block.hash = key.hash
            self._by_hash[key.hash] = block
        assert block.content_id is not None
        return block.content_id
