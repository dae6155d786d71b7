"""A scheduler driven without a model: a shadow of the KV pool says what each slot holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine import Completion, SamplingParams
from engine.block_manager import BlockManager, hash_block
from engine.scheduler import ScheduledBatch, Scheduler
from engine.sequence import Sequence, SequenceStatus

GARBAGE = -1
NUM_TOKENS = 3  # so few that random prompts share prefixes all the time

__all__ = ["Completion", "ShadowEngine"]


class ShadowEngine:
    """Runs scheduled batches on a pool of prefix ids and checks every invariant on the way.

    The keys and values of a token depend on all tokens before it, so a slot holds the id of the whole
    prefix. The next token is a function of that id: a preempted sequence must find the same one.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 12,
        block_size: int = 4,
        max_num_seqs: int = 5,
        max_num_batched_tokens: int = 11,
        max_model_len: int = 40,
        enable_prefix_caching: bool = True,
        hash_block: Callable[[int, bytes], int] = hash_block,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, hash_block=hash_block
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.pool = np.full((num_blocks, block_size), GARBAGE)
        self.unfinished: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self._prefix_ids: dict[tuple[int, int], int] = {}
        self._num_added = 0

    def add(self, prompt: list[int], *, lane: int = 0, max_tokens: int = 4) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens)
        seq = Sequence(str(self._num_added), prompt, params, lane=lane, stop_token_ids=frozenset((0,)))
        self._num_added += 1
        self.scheduler.add(seq)
        self.unfinished.append(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq)
        self.unfinished.remove(seq)
        self.check()

    def step(self, *, fails: bool = False) -> ScheduledBatch:
        """Schedule, compute, check; `fails` leaves what the step wrote as garbage and withdraws it."""
        waiting = [seq for seq in self.unfinished if seq.status is SequenceStatus.WAITING]
        must_run = self._must_run()
        batch = self.scheduler.schedule()
        self.admitted += [seq for seq in waiting if seq.status is SequenceStatus.RUNNING]
        self._check_batch(batch)
        assert must_run is None or must_run in batch.seqs
        self._write(batch, fails=fails)
        if fails:
            self.scheduler.withdraw()
        else:
            self._check_contents(batch)
            done = self.scheduler.advance(batch, self._sample(batch))
            self.finished += done
            self.unfinished = [seq for seq in self.unfinished if seq not in done]
        self.check()
        return batch

    def drain(self) -> None:
        """Step until all is finished; nothing may starve or loop."""
        longest = self.scheduler.max_model_len
        bound = 2 * longest * (len(self.unfinished) + 1)
        while self.scheduler.has_unfinished:
            assert self.step().num_tokens > 0
            bound -= 1
            assert bound > 0, f"still unfinished: {self.unfinished}"
        assert self.unfinished == []
        assert self.blocks.num_free_blocks == self.blocks.num_blocks

    def check(self) -> None:
        """Blocks, references and tables agree; the slot arrays repeat the sequences' state."""
        scheduler, slots = self.scheduler, self.scheduler.slots
        scheduler.check_accounting()
        running = [seq for seq in self.unfinished if seq.status is SequenceStatus.RUNNING]
        assert sorted(map(id, running)) == sorted(map(id, scheduler.running))
        assert len({seq.slot for seq in running}) == len(running) <= scheduler.max_num_seqs
        assert slots.num_free == scheduler.max_num_seqs - len(running)
        order = [(seq.lane, seq.arrival) for seq in scheduler.running]
        assert order == sorted(order)
        for seq in running:
            assert slots.token_ids[seq.slot, : len(seq)].tolist() == seq.token_ids
            assert slots.block_tables[seq.slot, : len(seq.block_table)].tolist() == seq.block_table
            assert slots.num_tokens[seq.slot] == len(seq)
            assert slots.num_computed[seq.slot] == seq.num_computed_tokens < len(seq)
        for seq in self.unfinished:
            assert seq.status is SequenceStatus.RUNNING or not (seq.block_table or seq.num_computed_tokens)

    def prefixes(self, token_ids: list[int]) -> list[int]:
        """The id of each prefix of these tokens."""
        ids, parent = [], 0
        for token_id in token_ids:
            parent = self._prefix_ids.setdefault((parent, token_id), len(self._prefix_ids) + 1)
            ids.append(parent)
        return ids

    def next_token(self, token_ids: list[int]) -> int:
        """What the shadow model answers: 0, which ends a sequence, now and then."""
        draw = hash(tuple(token_ids)) % 26
        return 0 if draw == 0 else 1 + draw % (NUM_TOKENS - 1)

    def _must_run(self) -> Sequence | None:
        """The sequence of lane 0 that waits alone there, if only later lanes hold anything."""
        queue = self.scheduler.waiting.get(0, ())
        if len(queue) != 1 or any(seq.lane == 0 for seq in self.scheduler.running):
            return None
        return None if any(n >= 19 for n in self.scheduler._overtakes.values()) else queue[0]

    def _check_batch(self, batch: ScheduledBatch) -> None:
        scheduler = self.scheduler
        num_new = batch.num_new_tokens.tolist()
        assert sum(num_new) == batch.num_tokens <= scheduler.max_num_batched_tokens
        assert len({id(seq) for seq in batch.seqs}) == len(num_new)
        for seq, n in zip(batch.seqs, num_new, strict=True):
            assert seq.status is SequenceStatus.RUNNING
            assert 0 < n <= len(seq) - seq.num_computed_tokens

    def _write(self, batch: ScheduledBatch, *, fails: bool) -> None:
        published = {block.block_id for block in self.blocks._published_in_step}
        written = set()
        for seq, n in zip(batch.seqs, batch.num_new_tokens.tolist(), strict=True):
            ids = self.prefixes(seq.token_ids)
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + n):
                slot = seq.block_table[position // self.blocks.block_size], position % self.blocks.block_size
                assert slot not in written, "two sequences write one slot"
                assert self.blocks._blocks[slot[0]].ref_count == 1 or slot[0] in published
                written.add(slot)
                self.pool[slot] = GARBAGE if fails else ids[position]

    def _check_contents(self, batch: ScheduledBatch) -> None:
        """What a sequence attends to is its own prefix, whoever wrote it."""
        for seq, n in zip(batch.seqs, batch.num_new_tokens.tolist(), strict=True):
            context = self.pool[seq.block_table].flatten()[: seq.num_computed_tokens + n]
            assert context.tolist() == self.prefixes(seq.token_ids)[: len(context)]

    def _sample(self, batch: ScheduledBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        sampling = [
            seq
            for seq, n in zip(batch.seqs, batch.num_new_tokens.tolist(), strict=True)
            if seq.num_computed_tokens + n == len(seq)
        ]
        return np.array([self.next_token(seq.token_ids) for seq in sampling], np.int64)
