"""Scheduler: owner of every sequence's status, of the waiting queues and of the running list.

One token budget holds a step's decodes and prefill chunks. Lanes order sequences by urgency, 0 first; in
a lane the earlier arrival goes first. A step is filled lane by lane: decodes, prefills under way, then
admissions, which may take slots and blocks from less urgent lanes, the latest sequence first. Whoever is
taken from recomputes later and yields the same tokens.

Why nothing starves: the earliest running sequence of the most urgent lane is never preempted and always
fits, so that lane drains in order. A less urgent lane counts the admissions that overtake it, and after
nineteen its first sequence moves up into the overtaking lane, where no new arrival is ahead of it.

A step may be scheduled while the one before it runs. So the books are kept in two halves: `advance` counts
what a step computes when it is launched, with a pending token for each sequence that samples, and `receive`
fills the tokens in and finds the ends that depend on them. Lengths are known ahead: at its last token a
sequence gives up slot and blocks when that step is launched. One that ends otherwise has overrun by one
token in the step launched meanwhile, which is dropped.

Blocks are given up while launched steps still read and write them. Whoever takes them writes in a later
launch, and the device runs launches in order.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.schedule.block_manager import BlockManager
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.sequence import Sequence, SequenceStatus
from engine.schedule.slots import SlotTable

MAX_OVERTAKES = 19  # a waiting lane gets at least one admission in twenty


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
        self.in_flight: deque[ScheduledBatch] = deque()  # scheduled and not received, the oldest first
        self.first_scheduled: list[str] = []  # request ids of sequences, in that order; the engine empties it
        self.max_running = 0
        self.num_preemptions = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.decode_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold neither slot nor blocks."""
        return sum(map(len, self.waiting.values()))

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, shorter than max_model_len, in its lane."""
        assert seq.num_tokens < self.max_model_len, "a prompt must leave room for one new token"
        self.blocks.extend_keys(seq)
        seq.arrival = self._num_arrivals
        self._num_arrivals += 1
        seq.max_len = min(seq.max_len, self.max_model_len)
        self.waiting.setdefault(seq.lane, deque()).append(seq)

    def abort(self, seq: Sequence) -> None:
        """Forget an unfinished sequence and free what it holds. Not between `schedule` and `advance`."""
        self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = "abort"

    def fail(self, seq: Sequence, error: Exception) -> None:
        """As `abort`, for a sequence that cannot go on because of `error`."""
        self.abort(seq)
        seq.fail(error)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step and reserve all it needs; there is nothing to do if it has no tokens.

        Follow with `advance` when it is launched, or `withdraw`. At most one step may be in flight before it.
        """
        batch = ScheduledBatch()
        self.in_flight.append(batch)
        for lane in sorted({seq.lane for seq in self.running}.union(self.waiting)):
            prefills = self._schedule_decodes(lane, batch)
            self._schedule_prefills(lane, prefills, batch)
            self._admit(lane, batch)
        self.waiting = {lane: queue for lane, queue in self.waiting.items() if queue}
        self.max_running = max(self.max_running, len(self.running))
        if not batch.num_tokens:
            self.in_flight.pop()
        return batch

    def advance(self, batch: ScheduledBatch) -> None:
        """The step just scheduled is launched: count what it computes, and a pending token per sample."""
        batch.launched = True
        self.slots.advance(batch.slots, batch.num_new_tokens, batch.samples)
        for seq, num_new_tokens in zip(batch.seqs, batch.num_new_tokens.tolist(), strict=True):
            seq.num_computed_tokens += num_new_tokens
        ending = []
        for seq in batch.sampling:
            seq.num_tokens += 1
            if seq.num_tokens >= seq.max_len:
                ending.append(seq)
        for seq in ending:
            seq.status = SequenceStatus.ENDING
            self._release(seq)
        if ending:
            self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def receive(self, token_ids: NDArray[np.int64]) -> list[Sequence]:
        """The oldest step in flight has run: fill in the tokens; return the sequences that finished.

        token_ids: [samples] int64. Those of sequences that are gone by now are dropped: they were aborted
        while the step ran, or ended with the token before.
        """
        batch = self.in_flight.popleft()
        slots = np.array([seq.slot for seq in batch.sampling], np.int64)
        held = slots >= 0
        self.slots.add_known(slots[held], token_ids[held])
        self.prefill_tokens += batch.num_tokens - batch.num_decode_tokens
        self.decode_tokens += batch.num_decode_tokens - (0 if held.all() else batch.num_dropped)
        finished = []
        for seq, token_id in zip(batch.sampling, token_ids.tolist(), strict=True):
            if seq.status is SequenceStatus.FINISHED:
                continue
            try:
                if seq.append(token_id):
                    finished.append(seq)
            except Exception as error:  # noqa: BLE001 - what its text raises is this sequence's end alone
                seq.fail(error)
                finished.append(seq)
        for seq in finished:
            self._leave(seq)
            seq.status = SequenceStatus.FINISHED
        return finished

    def withdraw(self) -> None:
        """A step has failed: nothing in flight counts, and every sequence that ran waits to compute again.

        What steps in flight published cannot be hit, and their tokens will be sampled again.
        """
        for batch in self.in_flight:
            self.blocks.withdraw(batch.published)
            for seq in batch.sampling:
                seq.num_tokens = len(seq.token_ids)
                if seq.status is SequenceStatus.ENDING:
                    self._wait_again(seq)
        self.in_flight.clear()
        for seq in self.running:
            self._release(seq)
            self._wait_again(seq)
        self.running = []

    def split(self) -> None:
        """The first step in flight becomes two that do the same, one after the other; it is not launched."""
        self.in_flight.extendleft(reversed(self.in_flight.popleft().split()))

    def set_aside(self) -> Sequence:
        """The first step in flight, which is of one sequence, is not computed: that one waits again.

        So do all that run, if any of them builds on what that step would have computed.
        """
        batch = self.in_flight.popleft()
        (seq,) = batch.seqs
        self.blocks.withdraw(batch.published)
        missing = {block.block_id for block in batch.published}
        self.running.remove(seq)
        self._release(seq)
        self._wait_again(seq)
        if not all(missing.isdisjoint(other.block_table) for other in self.running):
            self.withdraw()
        return seq

    def schedule_control(self, seq: Sequence) -> ScheduledBatch:
        """A step of the engine's own short sequence, which is in no queue. Follow with `release_control`.

        If all is taken, which it is not after `set_aside`, the least urgent gives way.
        """
        while not self.slots.num_free or not self.blocks.num_free_blocks:
            self._preempt(self.running[-1])
        self.blocks.allocate(seq, [])
        self.slots.assign(seq)
        batch = ScheduledBatch()
        batch.add_prefill(seq, seq.num_tokens)
        return batch

    def release_control(self, seq: Sequence) -> None:
        """Take back what `schedule_control` gave, also where it raised."""
        if seq.slot >= 0:
            self._release(seq)

    def check_accounting(self) -> None:
        """Raise BlockAccountingError unless blocks, references and block tables agree."""
        self.blocks.check_accounting(self.running)

    def _schedule_decodes(self, lane: int, batch: ScheduledBatch) -> list[Sequence]:
        """Schedule the lane's sequences with one token to compute; return those in mid-prefill.

        In a given step few of them begin a block or have filled one. Arrays tell which: the others cost
        nothing here, and at 256 sequences that is a third of the host's time.
        """
        seqs = [seq for seq in self.running if seq.lane == lane]
        slots, size = np.array([seq.slot for seq in seqs], np.int64), self.blocks.block_size
        num_tokens, num_known = self.slots.num_tokens[slots], self.slots.num_known[slots]
        in_prefill = num_tokens - self.slots.num_computed[slots] > 1
        for i in np.flatnonzero(~in_prefill & ((num_tokens - 1) % size == 0)).tolist():
            if seqs[i].status is SequenceStatus.RUNNING:
                self._grow(seqs[i])
        # whoever had to give way to them was taken from the end of the running list
        is_running = np.array([seq.status is SequenceStatus.RUNNING for seq in seqs], bool)
        is_decode = ~in_prefill & is_running
        decodes = seqs if is_decode.all() else [seqs[i] for i in np.flatnonzero(is_decode).tolist()]
        batch.decodes += decodes
        batch.num_tokens += len(decodes)
        batch.num_decode_tokens += int((is_decode & (num_tokens > self.slots.num_prompt[slots])).sum())
        for i in np.flatnonzero(is_decode & (num_known % size == 0)).tolist():
            self._publish(seqs[i], seqs[i].num_tokens, batch)
        return [seqs[i] for i in np.flatnonzero(in_prefill).tolist()]

    def _schedule_prefills(self, lane: int, prefills: list[Sequence], batch: ScheduledBatch) -> None:
        for seq in prefills:
            if seq.status is SequenceStatus.RUNNING and (budget := self._prefill_budget(lane, batch)) > 0:
                self._schedule_chunk(seq, budget, batch)

    def _schedule_chunk(self, seq: Sequence, budget: int, batch: ScheduledBatch) -> None:
        num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
        batch.add_prefill(seq, num_new_tokens)
        self._publish(seq, seq.num_computed_tokens + num_new_tokens, batch)

    def _publish(self, seq: Sequence, num_tokens: int, batch: ScheduledBatch) -> None:
        """Publish the blocks that are full once `num_tokens` are computed, as far as those are known.

        A block that a pending token completes is published a step later: it has no hash before.
        """
        num_known = min(num_tokens, len(seq.token_ids))
        if num_known // self.blocks.block_size > seq.num_published_blocks:
            batch.published += self.blocks.publish(seq, num_known)

    def _prefill_budget(self, lane: int, batch: ScheduledBatch) -> int:
        """Tokens left for prefills of this lane: less urgent lanes keep one for each of their decodes."""
        reserved = 0
        if self.running and self.running[-1].lane > lane:
            reserved = sum(
                seq.lane > lane and seq.num_tokens - seq.num_computed_tokens == 1 for seq in self.running
            )
        return self.max_num_batched_tokens - batch.num_tokens - reserved

    def _admit(self, lane: int, batch: ScheduledBatch) -> None:
        """Admit the lane's waiting sequences in order while they fit."""
        self._move_up_overtaken(lane)
        while (queue := self.waiting.get(lane)) and (budget := self._prefill_budget(lane, batch)) > 0:
            seq = queue[0]
            if seq.num_pending_tokens:  # preempted just now: its turn comes when the running step has told
                return
            cached = self.blocks.find_cached(seq)
            if not self._make_room(seq, cached):
                return
            self.blocks.allocate(seq, cached)
            try:
                self.slots.assign(seq)
            except Exception as error:  # noqa: BLE001 - its own values; the caller judges whose fault it is
                self._release(seq)
                batch.refused = seq, error
                return
            queue.popleft()
            seq.status = SequenceStatus.RUNNING
            insort(self.running, seq, key=_urgency)
            self.cached_tokens += seq.num_computed_tokens
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
                self.first_scheduled.append(seq.request_id)
            self._schedule_chunk(seq, budget, batch)
            self._count_overtakes(lane)
            self._move_up_overtaken(lane)

    def _make_room(self, seq: Sequence, cached: list[int]) -> bool:
        """Preempt less urgent sequences until `seq` can be admitted; preempt none if that cannot suffice.

        Where there are none, each sequence that runs keeps a free block to grow into: else the newcomer would
        be preempted for it within a few steps, and computed again and again.
        """
        missing = self.blocks.num_missing(seq, cached)
        victims = [other for other in self.running if other.lane > seq.lane]
        if self.slots.num_free and missing <= 0:
            return bool(victims) or -missing >= len(self.running) or -missing >= self._num_growing()
        if not victims or (missing > 0 and self.blocks.num_freed_by(victims, keep=cached) < missing):
            return False
        while not self.slots.num_free or self.blocks.num_missing(seq, cached) > 0:
            self._preempt(self.running[-1])
        return True

    def _num_growing(self) -> int:
        """Running sequences that may need another block."""
        size = self.blocks.block_size
        return sum(seq.max_len > len(seq.block_table) * size for seq in self.running)

    def _grow(self, seq: Sequence) -> None:
        """Make sure `seq` has a block for its last token, unless it has to be preempted itself.

        The last running sequence is never one already scheduled: a step is filled in running order.
        """
        if seq.num_tokens <= len(seq.block_table) * self.blocks.block_size:
            return
        while not self.blocks.num_free_blocks:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return
        self.blocks.grow(seq)
        self.slots.add_block(seq)

    def _preempt(self, seq: Sequence) -> None:
        assert seq is self.running[-1]
        self.running.pop()
        self._release(seq)
        self._wait_again(seq)
        self.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        """Take an unfinished sequence out of its list and free what it holds."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting[seq.lane].remove(seq)

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
        return [seq for seq in self.running if seq.num_tokens - seq.num_computed_tokens > 1]


def _urgency(seq: Sequence) -> tuple[int, int]:
    return seq.lane, seq.arrival
