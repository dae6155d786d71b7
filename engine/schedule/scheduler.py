"""Scheduler: owner of every sequence's status, of the waiting queues and of the running list.

One token budget holds a step's decodes and prefill chunks. Lanes order sequences by urgency, 0 first; in
a lane the earlier arrival goes first. A step is filled lane by lane: decodes, prefills under way, then
admissions, which may preempt sequences of less urgent lanes, the latest first. A preempted sequence
recomputes later and yields the same tokens.

Nothing starves: the earliest running sequence of the most urgent lane is never preempted and always fits. A
less urgent lane counts the admissions that overtake it, and after nineteen its first sequence moves up into
the overtaking lane, where no new arrival is ahead of it.

A step may be scheduled while the one before it runs. `advance` counts what a step computes when it is
launched, with a pending token for each sequence that samples; `receive` fills the tokens in. A sequence that
reaches max_len gives up slot and blocks as soon as its last step is launched: another sequence may take them, as its
step is launched later and launches run in order. If a sequence ends for another reason, the step launched after that
has computed one token too many for it, and this token is dropped.
"""

import time
from bisect import insort
from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from engine.schedule.block_manager import BlockManager
from engine.schedule.drafts import Drafted, Drafts
from engine.schedule.lanes import AdmissionGate, RunningList, SlotGroup, urgency
from engine.schedule.logprobs import RowLogprobs
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.sequence import Sequence, SequenceStatus
from engine.schedule.slots import SlotTable
from engine.schedule.snapshots import StateMoves
from engine.schedule.step_batch import give_logprobs, give_pooled
from engine.text.prompts import num_common

MAX_SAMPLED = 256  # rows of a step with guesses, whose logits take memory
MAX_OVERTAKES = 19  # a waiting lane gets at least one admission in twenty


class Scheduler:
    """Chooses the sequences of each step, and owns their status. The pool must hold one sequence of max_model_len."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        batches_admissions: bool = False,
        in_one_step: bool = False,
    ) -> None:
        """batches_admissions: hold a backlog's admissions back for a few steps, see AdmissionGate.

        in_one_step: a sequence's tokens are computed in one step, never in chunks.
        """
        assert max_model_len <= block_manager.num_blocks * block_manager.block_size, (
            "one sequence fits into the pool"
        )
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.slots = SlotTable(max_num_seqs, max_model_len, block_manager.block_size)
        self.waiting: dict[int, deque[Sequence]] = {}  # by lane, in order of arrival
        self.running = RunningList()
        self._gate = AdmissionGate(batches=batches_admissions)
        self._num_arrivals = 0
        # Scheduled and not received, the oldest first.
        self.in_flight: deque[ScheduledBatch] = deque()
        # The request id of each sequence that was admitted for the first time. The engine empties this list.
        self.first_scheduled: list[str] = []
        self.max_running = self.num_preemptions = 0
        self.prefill_tokens = self.cached_tokens = self.decode_tokens = self.generation_tokens = 0
        self.max_num_batched_tokens = max_num_batched_tokens
        self._in_one_step = in_one_step
        # The admissions that overtook each lane since it last moved up.
        self._overtakes: Counter[int] = Counter()

    @property
    def num_waiting(self) -> int:
        """The number of sequences with neither slot nor blocks."""
        return sum(map(len, self.waiting.values()))

    def add(self, seq: Sequence) -> None:
        """Queue a sequence in its lane.

        A sequence that generates must have fewer tokens than max_model_len. A sequence that was held after it had been
        queued keeps its place in the order of arrival.
        """
        assert seq.num_tokens + seq.generates <= self.max_model_len, "a new token needs room"
        self.blocks.extend_keys(seq)
        if not seq.arrived_at:
            seq.arrival = self._num_arrivals
            seq.arrived_at = time.monotonic()
            self._num_arrivals += 1
        seq.max_len = min(seq.max_len, self.max_model_len)
        self._wait_again(seq)

    def hold(self, seq: Sequence) -> None:
        """Take a waiting sequence out of its queue; `add` queues it again."""
        assert seq.status is SequenceStatus.WAITING
        self._remove(seq)
        seq.status = SequenceStatus.HELD

    def abort(self, seq: Sequence) -> None:
        """Forget an unfinished sequence and free its blocks. Not to be called between `schedule` and `advance`."""
        self._remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = "abort"

    def schedule(self, drafts: Drafts | None = None) -> ScheduledBatch:
        """Choose the next step and reserve its blocks. The step has no tokens if there is nothing to compute.

        Call `advance` once the step is launched, or else `withdraw`. At most one step may be in flight before it.

        drafts: adds guesses to the step. Then no other step may be in flight, and the next one may be launched only
        after the tokens of this one are received.
        """
        batch = self._new_batch()
        self.in_flight.append(batch)
        self._gate.begin_step(len(self.running))
        for lane in sorted(self.running.lanes.keys() | self.waiting.keys()):
            if lane in self.running.lanes:
                self._schedule_running(self.running.lanes[lane], batch)
            self._admit(lane, batch)
        self.waiting = {lane: queue for lane, queue in self.waiting.items() if queue}
        self.max_running = max(self.max_running, len(self.running))
        if not batch.num_tokens:
            self.in_flight.pop()
        elif drafts is not None and batch.states is None and not batch.has_prompts:
            self._draft(batch, drafts)
        return batch

    def advance(self, batch: ScheduledBatch) -> None:
        """Count the tokens of the step just built and launched, and a pending token per sample."""
        batch.launched = True
        self.blocks.let_go_sources(batch.copies)
        self.blocks.launched(batch.published)
        for seq, count in batch.scored + batch.pooled:
            wanted = seq.targets if seq.pooled is None else seq.pooled
            assert wanted is not None
            wanted.next += count
        ordinary = slice(len(batch.seqs) - len(batch.drafted))
        self.slots.advance(
            batch.slots[ordinary], batch.num_new_tokens[ordinary], batch.samples[ordinary]
        )
        batch.generations = self.slots.generations[batch.sampling_slots]
        for seq in batch.decodes:
            seq.num_computed_tokens += 1
            seq.num_tokens += 1
        for seq, num_new_tokens, samples in batch.each_prefill():
            seq.num_computed_tokens += num_new_tokens
            if samples:
                seq.num_tokens += 1
            if seq.num_computed_tokens == seq.num_tokens:
                batch.ending.append(seq)
        num_tokens = self.slots.num_tokens[batch.sampling_slots]
        is_at_end = num_tokens >= self.slots.max_len[batch.sampling_slots]
        ending = [batch.sampling[i] for i in np.flatnonzero(is_at_end).tolist()] + batch.ending
        if ending:
            self.running.remove(ending)
            self._gate.count_left(len(ending))
        for seq in ending:
            seq.status = SequenceStatus.ENDING
            self._release(seq)

    def receive(
        self,
        token_ids: NDArray[np.int64],
        logprobs: RowLogprobs | None = None,
        pooled: NDArray[np.float32] | None = None,
    ) -> list[Sequence]:
        """Fill in the tokens of the oldest step in flight, which has run; return the sequences that finished.

        token_ids: [samples] int64. logprobs: of the samples and then of the scored tokens, if any.
        pooled: a row for each sequence of `batch.pooled`.
        """
        batch = self.in_flight.popleft()
        if logprobs is not None:
            give_logprobs(logprobs, batch)
        if pooled is not None:
            give_pooled(pooled, batch)
        slots = batch.sampling_slots
        ordinary = token_ids[: len(slots)]
        keeps_slot = self.slots.generations[slots] == batch.generations
        goes_on = keeps_slot & ~self.slots.may_end(slots, ordinary)
        self.slots.add_known(slots[keeps_slot], ordinary[keeps_slot])
        num_guesses = batch.num_guessed - len(batch.drafted)
        self.prefill_tokens += batch.num_tokens - num_guesses - batch.num_decode_tokens
        gone = []
        if not keeps_slot.all():
            gone = [seq for seq in batch.decodes if seq.status is SequenceStatus.FINISHED]
        self.decode_tokens += batch.num_decode_tokens
        self.decode_tokens -= sum(len(seq.token_ids) > seq.num_prompt_tokens for seq in gone)
        finished = []
        num_dropped = 0
        for seq, token_id, is_plain in zip(
            batch.sampling, ordinary.tolist(), goes_on.tolist(), strict=True
        ):
            if is_plain:
                seq.token_ids.append(token_id)
            elif seq.num_stale:
                seq.num_stale -= 1
                num_dropped += 1
            elif seq.status is SequenceStatus.FINISHED:
                num_dropped += 1
            elif self._ends_with(seq, token_id):
                finished.append(seq)
        self.generation_tokens += len(batch.sampling) - num_dropped
        moment = time.monotonic()
        for seq, _, samples in batch.each_prefill():
            if samples and seq.first_token_at is None:
                seq.first_token_at = moment
        for seq in batch.ending:
            if seq.status is not SequenceStatus.FINISHED:
                seq.end_scored()
                finished.append(seq)
        finished += self._receive_drafted(batch.drafted, token_ids[len(batch.sampling) :].tolist())
        for seq in finished:
            self._remove(seq)
            seq.status = SequenceStatus.FINISHED
            if seq.error is None:
                self._queue_followers(seq)
        return finished

    def withdraw(self) -> None:
        """Withdraw all steps in flight, as one has failed: all running sequences wait and compute again."""
        for batch in self.in_flight:
            self.blocks.withdraw(batch.published)
            if batch.states is not None and self.blocks.snapshots is not None:
                self.blocks.snapshots.drop(batch.states.kept)
            if not batch.launched:
                self.blocks.let_go_sources(batch.copies)
            for seq in batch.sampling + batch.ending:
                seq.num_tokens = len(seq.token_ids)
                seq.num_stale = 0
                if seq.status is SequenceStatus.ENDING:
                    self._wait_again(seq)
            for seq, _ in batch.scored + batch.pooled:
                seq.forget_launched()
        self.in_flight.clear()
        for seq in self.running:
            self._release(seq)
            self._wait_again(seq)
        self.running.clear()

    def split(self) -> None:
        """Split the first step in flight, which is not launched, into two steps that together do the same."""
        first, second = self.in_flight.popleft().split()
        self.in_flight.appendleft(second)
        self.in_flight.appendleft(first)

    def schedule_control(self, seq: Sequence) -> ScheduledBatch:
        """Make a step of one short sequence of the engine's own, while no other runs; then call `release_control`."""
        self.blocks.allocate(seq, [])
        self.slots.assign(seq)
        batch = self._new_batch()
        if batch.states is not None:
            self.blocks.begin_states(seq, [], (), batch.states)
        batch.add_prefill(seq, seq.num_tokens)
        return batch

    def _new_batch(self) -> ScheduledBatch:
        return ScheduledBatch(states=None if self.blocks.snapshots is None else StateMoves())

    def release_control(self, seq: Sequence) -> None:
        """Free the slot and blocks that `schedule_control` gave to `seq`, if any: it may have raised."""
        if seq.slot >= 0:
            self._release(seq)

    def _schedule_running(self, group: SlotGroup, batch: ScheduledBatch) -> None:
        """Schedule a lane's running sequences: a token of each decode, then chunks of prefills under way.

        A decode whose grammar awaits a token of a step in flight is left out of this one.
        """
        group = self._grow_all(group)
        in_prefill = self.slots.in_prefill(group.slots)
        decodes = group.select(~in_prefill)
        if self.slots.num_constrained:
            decodes = decodes.select(~self.slots.awaits_token(decodes.slots))
        batch.add_decodes(decodes)
        fills_block = self.slots.num_known[decodes.slots] % self.blocks.block_size == 0
        for i in np.flatnonzero(fills_block).tolist():
            self._publish(decodes.seqs[i], decodes.seqs[i].num_tokens, batch)
        if not in_prefill.any():
            return
        for seq in group.select(in_prefill).seqs:
            if seq.status is not SequenceStatus.RUNNING:
                continue
            budget = self._prefill_budget(seq.lane, batch)
            if budget > 0:
                self._schedule_chunk(seq, budget, batch)

    def _grow_all(self, group: SlotGroup) -> SlotGroup:
        """Give more blocks to the sequences that need them; return the sequences that were not preempted for that."""
        # A decode needs a block if its last token is the first of one.
        begins_block = (self.slots.num_tokens[group.slots] - 1) % self.blocks.block_size == 0
        num_preemptions = self.num_preemptions
        for i in np.flatnonzero(begins_block | self.slots.in_prefill(group.slots)).tolist():
            if group.seqs[i].status is SequenceStatus.RUNNING:
                self._grow(group.seqs[i])
        if self.num_preemptions == num_preemptions:
            return group
        is_running = [seq.status is SequenceStatus.RUNNING for seq in group.seqs]
        return group.select(np.array(is_running, np.bool_))

    def _draft(self, batch: ScheduledBatch, drafts: Drafts) -> None:
        """Add guesses to the decodes, as far as there are blocks and token budget for them."""
        slots = self.slots
        size = self.blocks.block_size
        may_draft = slots.may_draft(batch.decode_slots)
        most_rows = min(max(self.max_num_seqs, MAX_SAMPLED), self.max_num_batched_tokens)
        most = most_rows - batch.num_tokens
        if most <= 0 or not may_draft.any():
            return
        group = SlotGroup(batch.decodes, batch.decode_slots).select(may_draft)
        known = (
            slots.token_ids[slot, : seq.num_tokens]
            for seq, slot in zip(group.seqs, group.slots, strict=True)
        )
        chosen = iter(drafts.choose(group.seqs, known, most))
        guesses = [next(chosen) if may else [] for may in may_draft.tolist()]
        for seq, guess in zip(batch.decodes, guesses, strict=True):
            del guess[most:]
            if guess and seq.matcher is not None:
                # A guess ends before the first token that the grammar does not allow.
                del guess[seq.matcher.num_possible(guess) :]
            most -= len(guess)
            while guess and seq.num_tokens + len(guess) > len(seq.block_table) * size:
                if self.blocks.num_free_blocks > len(self.running):
                    self._add_block(seq)
                else:
                    guess.pop()
            slots.token_ids[seq.slot, seq.num_tokens : seq.num_tokens + len(guess)] = guess
        batch.add_guesses(guesses, drafts)

    def _receive_drafted(self, drafted: list[Drafted], token_ids: list[int]) -> list[Sequence]:
        """Fill in sampled and forced tokens up to the first that was not guessed; return the sequences that finished.

        token_ids: sequence by sequence, one behind its last token and one behind each guess.
        """
        finished: list[Sequence] = []
        start = 0
        for seq, guesses, drafts in drafted:
            sampled = token_ids[start : start + len(guesses) + 1]
            start += len(sampled)
            num_before = len(seq.token_ids)
            new: list[int] = []
            ends = False
            while not ends and new == guesses[: len(new)]:
                token_id = sampled[len(new)]
                if token_id < 0 and new:
                    break  # no token could be chosen behind a guess; a step without guesses finds out why
                if not seq.forced:
                    self.generation_tokens += 1
                ends = seq.learn(token_id).ends
                new = seq.token_ids[num_before:]
            if ends:
                finished.append(seq)
            num_right = num_common(guesses, new)
            drafts.count(seq, len(guesses), num_right)
            seq.num_tokens = len(seq.token_ids)
            seq.num_computed_tokens = min(num_before + num_right, seq.num_tokens - 1)
            self.slots.move_on(seq, len(new))
            self.blocks.launched(self.blocks.publish(seq, seq.num_computed_tokens))
            self.decode_tokens += seq.num_computed_tokens - num_before
        return finished

    def _schedule_chunk(self, seq: Sequence, budget: int, batch: ScheduledBatch) -> None:
        """Add the sequence's next prefill chunk to the step, if one fits the budget."""
        num_new_tokens = self._chunk(seq, seq.num_computed_tokens, budget)
        if num_new_tokens <= 0:
            return
        num_tokens = seq.num_computed_tokens + num_new_tokens
        batch.add_prefill(seq, num_new_tokens)
        self._publish(seq, num_tokens, batch)
        if batch.states is not None:
            self.blocks.save_states(seq, num_tokens, batch.states)
        if num_tokens == len(seq.token_ids):
            batch.published += self.blocks.publish_tail(seq)

    def _chunk(self, seq: Sequence, start: int, budget: int) -> int:
        """Return how many tokens from place `start` on to compute: `budget` at most, and no picture cut in two."""
        end = min(seq.num_tokens, start + budget)
        if seq.pictures is not None:
            end = seq.pictures.whole_until(end)
        return end - start

    def _publish(self, seq: Sequence, num_tokens: int, batch: ScheduledBatch) -> None:
        """Publish the blocks that are full of known tokens once `num_tokens` are computed."""
        num_known = min(num_tokens, len(seq.token_ids))
        if num_known // self.blocks.block_size > seq.num_published_blocks:
            batch.published += self.blocks.publish(seq, num_known)

    def _prefill_budget(self, lane: int, batch: ScheduledBatch) -> int:
        """Return how many tokens this lane may prefill: one is kept for each decode of less urgent lanes."""
        reserved = 0
        if self.running and self.running.last.lane > lane:
            reserved = sum(
                seq.lane > lane and seq.num_tokens - seq.num_computed_tokens == 1
                for seq in self.running
            )
        return self.max_num_batched_tokens - batch.num_tokens - reserved

    def _admit(self, lane: int, batch: ScheduledBatch) -> None:
        """Admit the lane's waiting sequences in order while they fit."""
        self._move_up_overtaken(lane)
        while True:
            queue = self.waiting.get(lane)
            if not queue:
                return
            budget = self._prefill_budget(lane, batch)
            if budget <= 0:
                return
            seq = queue[0]
            if seq.num_pending_tokens:
                return  # it was preempted just now, and waits for its token of the running step
            if self._in_one_step and seq.num_tokens > budget:
                return
            may_preempt = len(self.running) > 0 and self.running.last.lane > lane
            if self._gate.holds(lane) and not may_preempt:
                return
            cached = self.blocks.find_cached(seq)
            if self._chunk(seq, len(cached) * self.blocks.block_size, budget) <= 0:
                return
            tail = self.blocks.find_tail(seq, cached)
            if not self._make_room(seq, cached):
                self._gate.close(lane)
                return
            if tail is not None and self.blocks.num_missing(seq, cached, tail) > 0:
                tail = None  # the block to copy from is the last free one, and the sequence needs it for itself
            copy = self.blocks.allocate(seq, cached, tail)
            self.slots.assign(seq)
            if batch.states is not None:
                self.blocks.begin_states(seq, cached, queue, batch.states)
            queue.popleft()
            if copy is not None:
                batch.copies.append(copy)
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
        """Preempt less urgent sequences if `seq` needs it; return whether it fits, with blocks for others to grow."""
        num_spare = self.blocks.num_free_blocks - self.blocks.num_blocks_for(seq.num_tokens)
        if self.slots.num_free and num_spare >= len(self.running):
            return True  # even if none is cached and each running sequence takes a block
        num_missing = self.blocks.num_missing(seq, cached)
        victims = [other for other in self.running if other.lane > seq.lane]
        if self.slots.num_free and num_missing <= 0:
            num_left = -num_missing
            size = self.blocks.block_size
            num_growing = sum(
                other.max_len > len(other.block_table) * size for other in self.running
            )
            return bool(victims) or num_left >= num_growing
        if not victims:
            return False
        if num_missing > 0 and self.blocks.num_freed_by(victims, keep=cached) < num_missing:
            return False
        while not self.slots.num_free or self.blocks.num_missing(seq, cached) > 0:
            self._preempt()
        return True

    def _grow(self, seq: Sequence) -> None:
        """Give `seq` blocks for all its tokens. While none is free, preempt the least urgent sequence, maybe `seq`."""
        while seq.num_tokens > len(seq.block_table) * self.blocks.block_size:
            while not self.blocks.num_free_blocks:
                if self._preempt() is seq:
                    return
            self._add_block(seq)

    def _add_block(self, seq: Sequence) -> None:
        self.blocks.grow(seq)
        self.slots.block_tables[seq.slot, len(seq.block_table) - 1] = seq.block_table[-1]

    def _preempt(self) -> Sequence:
        """Take slot and blocks from the least urgent sequence; return it."""
        seq = self.running.pop()
        self._release(seq)
        self._wait_again(seq)
        self.num_preemptions += 1
        return seq

    def _count_overtakes(self, lane: int) -> None:
        """Count one admission from `lane` against every less urgent lane that waits or is mid-prefill."""
        if len(self.waiting) == 1 and self.running.last.lane <= lane:
            return  # only this lane waits, and no less urgent one runs
        lanes = {other for other, queue in self.waiting.items() if queue}
        if self.running.last.lane > lane:
            lanes.update(seq.lane for seq in self._mid_prefill())
        self._overtakes.update({other for other in lanes if other > lane})

    def _move_up_overtaken(self, lane: int) -> None:
        """Move the first sequences of lanes overtaken too often up into `lane`, by order of arrival."""
        overtaken = []
        for other, num_overtakes in self._overtakes.items():
            if other > lane and num_overtakes >= MAX_OVERTAKES:
                overtaken.append(other)
        for other in overtaken:
            del self._overtakes[other]
            in_prefill = [seq for seq in self._mid_prefill() if seq.lane == other]
            for seq in in_prefill:
                self.running.move(seq, lane)
            queue = self.waiting.get(other)
            if queue:
                first = queue.popleft()
                first.lane = lane
                self._wait_again(first)

    def _mid_prefill(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.num_tokens - seq.num_computed_tokens > 1]

    def _ends_with(self, seq: Sequence, token_id: int) -> bool:
        """Hand a sampled token to its sequence; return whether that ends the sequence."""
        learned = seq.learn(token_id)
        if learned.num_right is not None:  # launched steps computed other tokens than it has now
            seq.num_stale += learned.num_dropped
            self._go_back(seq, learned.num_right)
        return learned.ends

    def _go_back(self, seq: Sequence, num_right: int) -> None:
        """Compute a sequence again behind its first num_right tokens: forced tokens replaced those sampled there."""
        seq.num_tokens = len(seq.token_ids)
        num_computed = min(seq.num_computed_tokens, num_right, seq.num_tokens - 1)
        loses_state = num_computed < seq.num_computed_tokens and self.blocks.snapshots is not None
        seq.num_computed_tokens = num_computed
        if seq.status is SequenceStatus.ENDING:
            self._wait_again(seq)  # a sample was dropped, so it is not at max_len yet
        elif seq.status is SequenceStatus.RUNNING and loses_state:
            # A state cannot be taken back to an earlier token, so it is computed again.
            self.running.remove([seq])
            self._release(seq)
            self._wait_again(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self.slots.rewrite(seq)

    def _remove(self, seq: Sequence) -> None:
        """Take an unfinished sequence out of its list and free its blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove([seq])
            self._release(seq)
            self._gate.count_left(1)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting[seq.lane].remove(seq)

    def _queue_followers(self, seq: Sequence) -> None:
        """Queue the sequences that waited for `seq` to finish."""
        for follower in seq.followers:
            follower.arrival = seq.arrival
            follower.lane = seq.lane
            self.blocks.extend_keys(follower)
            self._wait_again(follower)

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        self.slots.release(seq)

    def _wait_again(self, seq: Sequence) -> None:
        """Queue a sequence in its lane, in order of arrival."""
        seq.status = SequenceStatus.WAITING
        queue = self.waiting.setdefault(seq.lane, deque())
        if queue and queue[-1].arrival > seq.arrival:
            insort(queue, seq, key=urgency)
        else:
            queue.append(seq)
