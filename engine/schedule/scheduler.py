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

import numpy as np

from engine.schedule.batch.scheduled_batch import ScheduledBatch
from engine.schedule.block_manager import BlockManager
from engine.schedule.books import Books
from engine.schedule.overtakes import Overtakes
from engine.schedule.running import SlotGroup
from engine.schedule.sequences.sequence import Sequence, SequenceStatus

MAX_WAITS = 8  # steps that a sequence is left for what others compute


class Scheduler(Books):
    """Chooses what each step computes. Raises ConfigError if the pool cannot hold one longest sequence."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        batches_admissions: bool = False,
    ) -> None:
        """batches_admissions: hold a backlog's admissions back for a few steps, see AdmissionGate."""
        super().__init__(
            block_manager,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            batches_admissions=batches_admissions,
        )
        self.max_num_batched_tokens = max_num_batched_tokens
        self._overtakes = Overtakes()

    def schedule(self) -> ScheduledBatch:
        """Choose the next step and reserve all it needs; there is nothing to do if it has no tokens.

        Follow with `advance` when it is launched, or `withdraw`. At most one step may be in flight before it.
        """
        batch = ScheduledBatch()
        self.in_flight.append(batch)
        self.blocks.begin_step()
        self._gate.begin_step(len(self.running))
        for lane in sorted(self.running.lanes.keys() | self.waiting.keys()):
            if lane in self.running.lanes:
                self._schedule_running(self.running.lanes[lane], batch)
            self._admit(lane, batch)
        self.waiting.drop_empty()
        self.max_running = max(self.max_running, len(self.running))
        if not batch.num_tokens:
            self.in_flight.pop()
        return batch

    def split(self) -> None:
        """The first step in flight becomes two that do the same, one after the other; it is not launched."""
        self.in_flight.extendleft(reversed(self.in_flight.popleft().split()))

    def set_aside(self) -> Sequence:
        """The first step in flight, which is of one sequence, is not computed: that one waits again.

        So do all that run, if any of them builds on what that step would have computed, or if no block is
        left for a control: what it held may all be shared, or be copied from.
        """
        batch = self.in_flight.popleft()
        (seq,) = batch.seqs
        self.blocks.withdraw(batch.published)
        self._let_go_sources(batch)
        missing = {block.block_id for block in batch.published}
        self.running.remove([seq])
        self._release(seq)
        self._wait_again(seq)
        builds_on_it = not all(missing.isdisjoint(other.block_table) for other in self.running)
        if builds_on_it or not self.blocks.num_free_blocks:
            self.withdraw()
        return seq

    def schedule_control(self, seq: Sequence) -> ScheduledBatch:
        """A step of the engine's own short sequence, which is in no queue. Follow with `release_control`.

        If all is taken, which it is not after `set_aside`, the least urgent gives way.
        """
        while not self.slots.num_free or not self.blocks.num_free_blocks:
            self._preempt()
        self.blocks.allocate(seq, [])
        self.slots.assign(seq)
        batch = ScheduledBatch()
        batch.add_prefill(seq, seq.num_tokens)
        return batch

    def release_control(self, seq: Sequence) -> None:
        """Take back what `schedule_control` gave, also where it raised."""
        if seq.slot >= 0:
            self._release(seq)

    def _schedule_running(self, group: SlotGroup, batch: ScheduledBatch) -> None:
        """Schedule a lane's running sequences: a token of each decode, then chunks of prefills under way."""
        group = self._grow_all(group)
        in_prefill = self.slots.in_prefill(group.slots)
        decodes = group.select(~in_prefill)
        num_generated = self.slots.num_tokens[decodes.slots] > self.slots.num_prompt[decodes.slots]
        batch.add_decodes(decodes, num_generated=int(num_generated.sum()))
        self._publish_decodes(decodes, batch)
        if in_prefill.any():
            self._schedule_prefills(group.select(in_prefill).seqs, batch)

    def _grow_all(self, group: SlotGroup) -> SlotGroup:
        """Give blocks to those that lack any; return those that had not to give way for it."""
        begins_block = (self.slots.num_tokens[group.slots] - 1) % self.blocks.block_size == 0
        num_preemptions = self.num_preemptions
        for i in np.flatnonzero(begins_block | self.slots.in_prefill(group.slots)).tolist():
            if group.seqs[i].status is SequenceStatus.RUNNING:
                self._grow(group.seqs[i])
        if self.num_preemptions == num_preemptions:
            return group
        return group.select(np.array([s.status is SequenceStatus.RUNNING for s in group.seqs], np.bool_))

    def _publish_decodes(self, decodes: SlotGroup, batch: ScheduledBatch) -> None:
        """Publish the blocks that their tokens fill, as soon as those are known."""
        may_fill = self.slots.num_known[decodes.slots] % self.blocks.block_size == 0
        for i in np.flatnonzero(may_fill).tolist():
            self._publish(decodes.seqs[i], decodes.seqs[i].num_tokens, batch)

    def _schedule_prefills(self, prefills: list[Sequence], batch: ScheduledBatch) -> None:
        for seq in prefills:
            if seq.status is SequenceStatus.RUNNING and (budget := self._prefill_budget(seq.lane, batch)) > 0:
                self._schedule_chunk(seq, budget, batch)

    def _schedule_chunk(self, seq: Sequence, budget: int, batch: ScheduledBatch) -> None:
        num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
        num_tokens = seq.num_computed_tokens + num_new_tokens
        batch.add_prefill(seq, num_new_tokens)
        self._publish(seq, num_tokens, batch)
        if num_tokens == len(seq.token_ids):
            batch.published += self.blocks.publish_tail(seq)

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
        if self.running and self.running.last.lane > lane:
            reserved = sum(
                seq.lane > lane and seq.num_tokens - seq.num_computed_tokens == 1 for seq in self.running
            )
        return self.max_num_batched_tokens - batch.num_tokens - reserved

    def _admit(self, lane: int, batch: ScheduledBatch) -> None:
        """Admit the lane's waiting sequences in order while they fit.

        Some are left for the next step, as this one computes what they would compute too.
        """
        left: list[Sequence] = []
        self._admit_while_they_fit(lane, batch, left)
        for seq in left:
            self.waiting.put_back(seq)

    def _admit_while_they_fit(self, lane: int, batch: ScheduledBatch, left: list[Sequence]) -> None:
        self._move_up_overtaken(lane)
        while (queue := self.waiting.get(lane)) and (budget := self._prefill_budget(lane, batch)) > 0:
            seq = queue[0]
            if seq.num_pending_tokens:  # preempted just now: its turn comes when the running step has told
                return
            may_take = len(self.running) > 0 and self.running.last.lane > lane
            if self._gate.holds(lane) and not may_take:
                return
            cached = self.blocks.find_cached(seq)
            tail = self.blocks.find_tail(seq, cached)
            if seq.num_waits < MAX_WAITS and self.blocks.find_tail_soon(seq, cached, tail):
                seq.num_waits += 1
                left.append(queue.popleft())
                continue
            if not self._make_room(seq, cached):
                self._gate.close(lane)
                return
            if tail is not None and self.blocks.num_missing(seq, cached, tail) > 0:
                tail = None  # its block is the last free one: the sequence needs it itself
            copy = self.blocks.allocate(seq, cached, tail)
            try:
                self.slots.assign(seq)
            except Exception as error:  # noqa: BLE001 - its own values; the caller judges whose fault it is
                self._release(seq)
                self.blocks.let_go_sources([copy] if copy else [])
                batch.refused = seq, error
                return
            queue.popleft()
            if copy is not None:
                batch.copies.append((seq, copy))
            seq.status = SequenceStatus.RUNNING
            self.running.add(seq)
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
            self._preempt()
        return True

    def _num_growing(self) -> int:
        """Running sequences that may need another block."""
        size = self.blocks.block_size
        return sum(seq.max_len > len(seq.block_table) * size for seq in self.running)

    def _grow(self, seq: Sequence) -> None:
        """Make sure `seq` has blocks for all its tokens, unless it has to be preempted itself.

        The last running sequence is never one already scheduled: a step is filled in running order.
        """
        while seq.num_tokens > len(seq.block_table) * self.blocks.block_size:
            while not self.blocks.num_free_blocks:
                if self._preempt() is seq:
                    return
            self.blocks.grow(seq)
            self.slots.add_block(seq)

    def _preempt(self) -> Sequence:
        """Take slot and blocks from the least urgent sequence, which is returned."""
        seq = self.running.pop()
        self._release(seq)
        self._wait_again(seq)
        self.num_preemptions += 1
        return seq

    def _count_overtakes(self, lane: int) -> None:
        """Count one admission from `lane` against every less urgent lane that waits or is mid-prefill."""
        others = {other for other, queue in self.waiting.items() if queue}
        if self.running.last.lane > lane:
            others.update(seq.lane for seq in self._mid_prefill())
        self._overtakes.count_admission(lane, others)

    def _move_up_overtaken(self, lane: int) -> None:
        """Move the first sequences of lanes overtaken too often up into `lane`, by order of arrival."""
        for other in self._overtakes.take_due(lane):
            for seq in [seq for seq in self._mid_prefill() if seq.lane == other]:
                self.running.move(seq, lane)
            if queue := self.waiting.get(other):
                seq = queue.popleft()
                seq.lane, seq.num_waits = lane, MAX_WAITS
                self._wait_again(seq)

    def _mid_prefill(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.num_tokens - seq.num_computed_tokens > 1]
