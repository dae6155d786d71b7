"""Books: what is known of every sequence, and what a step's launch and its tokens change of it.

A step may be scheduled while the one before it runs. So the books are kept in two halves: `advance` counts
what a step computes when it is launched, with a pending token for each sequence that samples, and `receive`
fills the tokens in and finds the ends that depend on them. Lengths are known ahead: at its last token a
sequence gives up slot and blocks when that step is launched. One that ends otherwise has overrun by one
token in the step launched meanwhile, which is dropped.

Blocks are given up while launched steps still read and write them. Whoever takes them writes in a later
launch, and the device runs launches in order.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.schedule.admission import AdmissionGate
from engine.schedule.batch.forced import learn
from engine.schedule.batch.pooled_rows import count_pooled, give_pooled
from engine.schedule.batch.scheduled_batch import ScheduledBatch
from engine.schedule.batch.scored_tokens import count_scored, give_logprobs
from engine.schedule.batch.slots import SlotTable
from engine.schedule.block_manager import BlockManager
from engine.schedule.running import RunningList
from engine.schedule.sequences.logprobs import RowLogprobs
from engine.schedule.sequences.sequence import Sequence, SequenceStatus
from engine.schedule.waiting import WaitingLanes


class Books:
    """The half of the scheduler that chooses nothing. Raises ConfigError if the pool cannot hold one longest
    sequence."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_model_len: int,
        batches_admissions: bool,
    ) -> None:
        pool_tokens = block_manager.num_blocks * block_manager.block_size
        if max_model_len > pool_tokens:
            raise ConfigError(
                f"max_model_len={max_model_len} does not fit into a KV pool of {pool_tokens} tokens: "
                "lower max_model_len or raise kv_cache_bytes"
            )
        self.blocks = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.slots = SlotTable(max_num_seqs, max_model_len, block_manager.block_size)
        self.waiting = WaitingLanes()
        self.running = RunningList()
        self._gate = AdmissionGate(batches=batches_admissions)
        self._num_arrivals = 0
        self.in_flight: deque[ScheduledBatch] = deque()  # scheduled and not received, the oldest first
        self.first_scheduled: list[str] = []  # request ids of sequences, in that order; the engine empties it
        self.max_running = 0
        self.num_preemptions = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.decode_tokens = 0
        self.generation_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold neither slot nor blocks."""
        return self.waiting.num_seqs

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence in its lane: shorter than max_model_len, or as long if it generates none."""
        assert seq.num_tokens + seq.generates <= self.max_model_len, "a new token needs room"
        self.blocks.extend_keys(seq)
        seq.arrival, seq.arrived_at = self._num_arrivals, time.monotonic()
        self._num_arrivals += 1
        seq.max_len = min(seq.max_len, self.max_model_len)
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """Forget an unfinished sequence and free what it holds. Not between `schedule` and `advance`."""
        self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = "abort"

    def fail(self, seq: Sequence, error: Exception) -> None:
        """As `abort`, for a sequence that cannot go on because of `error`."""
        self.abort(seq)
        seq.fail(error)

    def advance(self, batch: ScheduledBatch) -> None:
        """The step just scheduled is launched: count what it computes, and a pending token per sample."""
        batch.launched = True
        self._let_go_sources(batch)
        count_scored(batch, self.slots)
        count_pooled(batch, self.slots)
        self.slots.advance(batch.slots, batch.num_new_tokens, batch.samples)
        batch.generations = self.slots.generations[batch.sampling_slots]
        for seq in batch.decodes:
            seq.num_computed_tokens += 1
            seq.num_tokens += 1
        for seq, num_new_tokens, samples in batch.each_prefill():
            seq.num_computed_tokens += num_new_tokens
            seq.num_tokens += samples
            if seq.num_computed_tokens == seq.num_tokens:
                batch.ending.append(seq)
        at_end = self.slots.num_tokens[batch.sampling_slots] >= self.slots.max_len[batch.sampling_slots]
        ending = [batch.sampling[i] for i in np.flatnonzero(at_end).tolist()] + batch.ending
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
        """The oldest step in flight has run: fill in the tokens; return the sequences that finished.

        token_ids: [samples] int64. Those of sequences that are gone by now are dropped: they were aborted
        while the step ran, or ended with the token before. logprobs: if any were wanted, of the samples and
        then of the tokens that were scored. pooled: of the sequences that have rows for it.
        """
        batch = self.in_flight.popleft()
        if logprobs is not None:
            give_logprobs(logprobs, batch)
        if pooled is not None:
            give_pooled(pooled, batch)
        slots = batch.sampling_slots
        is_held = self.slots.generations[slots] == batch.generations
        goes_on = is_held & ~self.slots.may_end(slots, token_ids)
        self.slots.add_known(slots[is_held], token_ids[is_held])
        self.prefill_tokens += batch.num_tokens - batch.num_decode_tokens
        self.decode_tokens += batch.num_decode_tokens - (0 if is_held.all() else batch.num_dropped)
        finished, num_dropped = [], 0
        for seq, token_id, is_plain in zip(batch.sampling, token_ids.tolist(), goes_on.tolist(), strict=True):
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
        self._note_first_tokens(batch)
        for seq in batch.ending:
            if seq.status is not SequenceStatus.FINISHED:
                seq.end_scored()
                finished.append(seq)
        for seq in finished:
            self._leave(seq)
            seq.status = SequenceStatus.FINISHED
            if seq.error is None:
                self._queue_followers(seq)
        return finished

    def _note_first_tokens(self, batch: ScheduledBatch) -> None:
        moment = time.monotonic()
        for seq, _, samples in batch.each_prefill():
            if samples and seq.first_token_at is None:
                seq.first_token_at = moment

    def withdraw(self) -> None:
        """A step has failed: nothing in flight counts, and every sequence that ran waits to compute again.

        What steps in flight published cannot be hit, and their tokens will be sampled again.
        """
        for batch in self.in_flight:
            self.blocks.withdraw(batch.published)
            if not batch.launched:
                self._let_go_sources(batch)
            for seq in batch.sampling + batch.ending:
                seq.num_tokens, seq.num_stale = len(seq.token_ids), 0
                if seq.status is SequenceStatus.ENDING:
                    self._wait_again(seq)
            for seq, _ in batch.scored:
                seq.forget_scored()
            for seq, _ in batch.pooled:
                if seq.pooled is not None:
                    seq.pooled.forget()
        self.in_flight.clear()
        for seq in self.running:
            self._release(seq)
            self._wait_again(seq)
        self.running.clear()

    def check_accounting(self) -> None:
        """Raise BlockAccountingError unless blocks, references and block tables agree."""
        self.blocks.check_accounting(self.running)

    def _ends_with(self, seq: Sequence, token_id: int) -> bool:
        """Hand a token to its sequence; whether that ends it."""
        ends = seq.ends_with(token_id) if seq.forcing is None else learn(seq, token_id, self.slots)
        if seq.status is SequenceStatus.ENDING and not ends and seq.num_tokens < seq.max_len:
            self._wait_again(seq)  # its last token is to be computed anew
        return ends

    def _leave(self, seq: Sequence) -> None:
        """Take an unfinished sequence out of its list and free what it holds."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove([seq])
            self._release(seq)
            self._gate.count_left(1)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting[seq.lane].remove(seq)

    def _queue_followers(self, seq: Sequence) -> None:
        """What was held until `seq` is finished takes the place of it."""
        for follower in seq.followers:
            follower.arrival, follower.lane = seq.arrival, seq.lane
            self.blocks.extend_keys(follower)
            self._wait_again(follower)

    def _let_go_sources(self, batch: ScheduledBatch) -> None:
        self.blocks.let_go_sources(copy for _, copy in batch.copies)

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        self.slots.release(seq)

    def _wait_again(self, seq: Sequence) -> None:
        """Put a sequence that arrived before back among those that wait."""
        seq.status = SequenceStatus.WAITING
        self.waiting.put_back(seq)
