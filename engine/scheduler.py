"""Scheduler: owner of every sequence's status, of the waiting queues and of the running list.

One token budget holds a step's decodes and prefill chunks. Lanes order sequences by urgency, 0 first; in
a lane the earlier arrival goes first. A step is filled lane by lane: decodes, prefills under way, then
admissions, which may take slots and blocks from less urgent lanes, the latest sequence first. Whoever is
taken from recomputes later and yields the same tokens.

Why nothing starves: the earliest running sequence of the most urgent lane is never preempted and always
fits, so that lane drains in order. A less urgent lane counts the admissions that overtake it, and after
nineteen its first sequence moves up into the overtaking lane, where no new arrival is ahead of it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.block_manager import BlockManager
from engine.errors import ConfigError
from engine.sequence import Sequence, SequenceStatus
from engine.slots import SlotTable

MAX_OVERTAKES = 19  # a waiting lane gets at least one admission in twenty


@dataclass
class ScheduledBatch:
    """What one step computes: one token of each of `decodes`, `prefill_lens[i]` tokens of `prefills[i]`.

    A sequence of which every known token is then computed samples its next one.
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    prefill_lens: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add_decode(self, seq: Sequence) -> None:
        """Compute the one token of `seq` that is not computed yet."""
        self.decodes.append(seq)
        self.num_tokens += 1

    def add_prefill(self, seq: Sequence, num_new_tokens: int) -> None:
        """Compute the next `num_new_tokens` tokens of `seq`."""
        self.prefills.append(seq)
        self.prefill_lens.append(num_new_tokens)
        self.num_tokens += num_new_tokens

    @property
    def seqs(self) -> list[Sequence]:
        """All sequences of the step, decodes first."""
        return self.decodes + self.prefills

    @property
    def slots(self) -> NDArray[np.int64]:
        """[seqs] int64, the slot of each."""
        return np.array([seq.slot for seq in self.seqs], np.int64)

    @property
    def num_new_tokens(self) -> NDArray[np.int64]:
        """[seqs] int64, the tokens to compute for each."""
        return np.array([1] * len(self.decodes) + self.prefill_lens, np.int64)


class Scheduler:
    """Chooses what each step computes. Raises ConfigError if the pool cannot hold one longest sequence."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        pool_tokens = block_manager.num_blocks * block_manager.block_size
        if max_model_len > pool_tokens:
            raise ConfigError(
                f"max_model_len={max_model_len} does not fit into a KV pool of {pool_tokens} tokens: "
                "lower max_model_len or raise kv_cache_bytes"
            )
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.slots = SlotTable(max_num_seqs, max_model_len, block_manager.block_size)
        self.waiting: dict[int, deque[Sequence]] = {}
        self.running: list[Sequence] = []  # by (lane, arrival): the last one is the first to be preempted
        self._overtakes: Counter[int] = Counter()
        self._num_arrivals = 0
        self.max_running = 0
        self.num_preemptions = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.decode_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold neither slot nor blocks."""
        return sum(map(len, self.waiting.values()))

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.running) or any(self.waiting.values())

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, shorter than max_model_len, in its lane."""
        assert len(seq) < self.max_model_len, "a prompt must leave room for one new token"
        self.blocks.extend_keys(seq)
        seq.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.setdefault(seq.lane, deque()).append(seq)

    def abort(self, seq: Sequence) -> None:
        """Forget an unfinished sequence and free what it holds. Not between `schedule` and `advance`."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting[seq.lane].remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = "abort"

    def schedule(self) -> ScheduledBatch:
        """Choose the next step and reserve all it needs. Follow with `advance` or `withdraw`."""
        batch = ScheduledBatch()
        for lane in sorted({seq.lane for seq in self.running}.union(self.waiting)):
            prefills = self._schedule_decodes(lane, batch)
            self._schedule_prefills(lane, prefills, batch)
            self._admit(lane, batch)
        self.waiting = {lane: queue for lane, queue in self.waiting.items() if queue}
        self.max_running = max(self.max_running, len(self.running))
        return batch

    def advance(self, batch: ScheduledBatch, token_ids: NDArray[np.int64]) -> list[Sequence]:
        """The step has run: append each sampled token; return the sequences that finished.

        token_ids: one for each of `batch`'s sequences that sample, in the batch's order.
        """
        self.blocks.commit_step()
        # a prompt's last chunk may be one token and so be scheduled like a decode
        num_decodes = sum(len(seq) > seq.num_prompt_tokens for seq in batch.decodes)
        self.decode_tokens += num_decodes
        self.prefill_tokens += batch.num_tokens - num_decodes
        seqs, slots, num_new = batch.seqs, batch.slots, batch.num_new_tokens
        self.slots.add_computed(slots, num_new)
        self.slots.add_tokens(
            slots[self.slots.num_computed[slots] == self.slots.num_tokens[slots]], token_ids
        )
        finished = []
        sampled = iter(token_ids.tolist())
        for seq, num_new_tokens in zip(seqs, num_new.tolist(), strict=True):
            seq.num_computed_tokens += num_new_tokens
            if seq.num_computed_tokens == len(seq) and seq.append(next(sampled), self.max_model_len):
                finished.append(seq)
        for seq in finished:
            seq.status = SequenceStatus.FINISHED
            self._release(seq)
        if finished:
            self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]
        return finished

    def withdraw(self) -> None:
        """The step has not run: nothing it published can be hit, and every running sequence waits again."""
        self.blocks.withdraw_step()
        for seq in self.running:
            self._release(seq)
            self._wait_again(seq)
        self.running = []

    def check_accounting(self) -> None:
        """Raise BlockAccountingError unless blocks, references and block tables agree."""
        self.blocks.check_accounting(self.running)

    def _schedule_decodes(self, lane: int, batch: ScheduledBatch) -> list[Sequence]:
        """Schedule the lane's sequences with one token to compute; return those in mid-prefill."""
        prefills, i = [], 0
        while i < len(self.running) and self.running[i].lane <= lane:
            seq = self.running[i]
            if seq.lane == lane:
                if len(seq) - seq.num_computed_tokens > 1:
                    prefills.append(seq)
                elif self._grow(seq):
                    batch.add_decode(seq)
                    self.blocks.publish(seq, len(seq))
            i += 1
        return prefills

    def _schedule_prefills(self, lane: int, prefills: list[Sequence], batch: ScheduledBatch) -> None:
        for seq in prefills:
            if seq.status is SequenceStatus.RUNNING and (budget := self._prefill_budget(lane, batch)) > 0:
                self._schedule_chunk(seq, budget, batch)

    def _schedule_chunk(self, seq: Sequence, budget: int, batch: ScheduledBatch) -> None:
        num_new_tokens = min(len(seq) - seq.num_computed_tokens, budget)
        batch.add_prefill(seq, num_new_tokens)
        self.blocks.publish(seq, seq.num_computed_tokens + num_new_tokens)

    def _prefill_budget(self, lane: int, batch: ScheduledBatch) -> int:
        """Tokens left for prefills of this lane: less urgent lanes keep one for each of their decodes."""
        reserved = 0
        if self.running and self.running[-1].lane > lane:
            reserved = sum(
                seq.lane > lane and len(seq) - seq.num_computed_tokens == 1 for seq in self.running
            )
        return self.max_num_batched_tokens - batch.num_tokens - reserved

    def _admit(self, lane: int, batch: ScheduledBatch) -> None:
        """Admit the lane's waiting sequences in order while they fit."""
        self._move_up_overtaken(lane)
        while (queue := self.waiting.get(lane)) and (budget := self._prefill_budget(lane, batch)) > 0:
            seq = queue[0]
            cached = self.blocks.find_cached(seq)
            if not self._make_room(seq, cached):
                return
            queue.popleft()
            self.blocks.allocate(seq, cached)
            self.slots.assign(seq)
            seq.status = SequenceStatus.RUNNING
            insort(self.running, seq, key=_urgency)
            self.cached_tokens += seq.num_computed_tokens
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
            self._schedule_chunk(seq, budget, batch)
            self._count_overtakes(lane)
            self._move_up_overtaken(lane)

    def _make_room(self, seq: Sequence, cached: list[int]) -> bool:
        """Preempt less urgent sequences until `seq` can be admitted; preempt none if that cannot suffice."""
        missing = self.blocks.num_missing(seq, cached)
        if self.slots.num_free and missing <= 0:
            return True
        victims = [other for other in self.running if other.lane > seq.lane]
        if not victims or (missing > 0 and self.blocks.num_freed_by(victims, keep=cached) < missing):
            return False
        while not self.slots.num_free or self.blocks.num_missing(seq, cached) > 0:
            self._preempt(self.running[-1])
        return True

    def _grow(self, seq: Sequence) -> bool:
        """Make sure `seq` has a block for its last token; False if it had to be preempted itself.

        The last running sequence is never one already scheduled: a step is filled in running order.
        """
        if len(seq) <= len(seq.block_table) * self.blocks.block_size:
            return True
        while not self.blocks.num_free_blocks:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        self.blocks.grow(seq)
        self.slots.add_block(seq)
        return True

    def _preempt(self, seq: Sequence) -> None:
        assert seq is self.running[-1]
        self.running.pop()
        self._release(seq)
        self._wait_again(seq)
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        self.slots.release(seq)

    def _wait_again(self, seq: Sequence) -> None:
        """Put a sequence that arrived before into its lane's queue, in order of arrival."""
        seq.status = SequenceStatus.WAITING
        queue = self.waiting.setdefault(seq.lane, deque())
        position = next((i for i, other in enumerate(queue) if other.arrival > seq.arrival), len(queue))
        queue.insert(position, seq)

    def _count_overtakes(self, lane: int) -> None:
        """Count one admission from `lane` against every less urgent lane that waits or is mid-prefill."""
        overtaken = {other for other, queue in self.waiting.items() if other > lane and queue}
        if self.running[-1].lane > lane:
            overtaken.update(seq.lane for seq in self._mid_prefill() if seq.lane > lane)
        self._overtakes.update(overtaken)

    def _move_up_overtaken(self, lane: int) -> None:
        """Move the first sequences of lanes overtaken too often up into `lane`, by order of arrival."""
        for other in [other for other, n in self._overtakes.items() if other > lane and n >= MAX_OVERTAKES]:
            del self._overtakes[other]
            for seq in [seq for seq in self._mid_prefill() if seq.lane == other]:
                self.running.remove(seq)
                seq.lane = lane
                insort(self.running, seq, key=_urgency)
            if queue := self.waiting.get(other):
                seq = queue.popleft()
                seq.lane = lane
                self._wait_again(seq)

    def _mid_prefill(self) -> list[Sequence]:
        return [seq for seq in self.running if len(seq) - seq.num_computed_tokens > 1]


def _urgency(seq: Sequence) -> tuple[int, int]:
    return seq.lane, seq.arrival
