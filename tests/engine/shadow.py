"""A scheduler driven without a model: a shadow of the KV pool says what each slot holds."""

from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from engine import Completion, SamplingParams
from engine.attention.state_pool import state_parts
from engine.sampling.request_kinds import NO_NEW_TOKEN
from engine.schedule.block_manager import BlockManager, hash_block
from engine.schedule.drafts import Drafts
from engine.schedule.logprobs import NOT_WANTED, RowLogprobs
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.scheduler import Scheduler
from engine.schedule.score_tree import Targets
from engine.schedule.sequence import Forcing, Sequence, SequenceStatus
from engine.schedule.snapshots import Snapshots
from engine.schedule.step_batch import StepBatch, build_step_batch
from tests.engine.accounting import check_accounting

CPU = torch.device("cpu")
GARBAGE = -1
NUM_TOKENS = 3  # so few that random prompts share prefixes all the time

Arrived = tuple[NDArray[np.int64], RowLogprobs | None]

__all__ = ["Completion", "ShadowEngine"]


class ShadowDevice:
    """A model that answers by prefix: its KV pool holds, for each token, the id of the prefix it ends.

    The keys and values of a token depend on all tokens before it. So a wrong block, slot, position or token
    shows in the pool, where it is looked for, and in whatever is sampled from it.
    """

    def __init__(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self.states = np.full(num_states, GARBAGE)  # each the id of the prefix behind which it is
        self.pool = np.full((num_blocks, block_size), GARBAGE)
        self.sampled = np.zeros(0, np.int64)  # by the step computed last
        self.logprobs: RowLogprobs | None = (
            None  # that it wanted: a rank for each prefix, for each token itself
        )
        self._prefix_ids: dict[tuple[int, int], int] = {}
        self._prefixes: list[tuple[int, ...]] = [()]

    def compute(self, step: StepBatch, only: Iterable[int | None] = ()) -> NDArray[np.int64]:
        """Take pending tokens from the step before, store, attend, sample (of `only` if not empty): [samples] int64."""
        token_ids = step.token_ids.copy()
        token_ids[step.pending_rows] = self.sampled[step.pending_samples]
        pool, block_size = self.pool.reshape(-1), self.pool.shape[1]
        assert not set(step.copy_from.tolist()) & {
            *step.copy_to.tolist(),
            *step.slot_mapping.tolist(),
        }
        pool[step.copy_to] = pool[step.copy_from]
        places = (step.block_tables[:, :, None] * block_size + np.arange(block_size)).reshape(
            len(step.block_tables), -1
        )
        row, samples, sample_rows = 0, [], set(step.sample_rows.tolist())
        prefix_of_row: list[int] = []
        lens = list(zip(step.context_lens.tolist(), step.query_lens.tolist(), strict=True))
        for slots, (context_len, query_len) in zip(places, lens, strict=True):
            for position in range(context_len - query_len, context_len):
                parent = int(pool[slots[position - 1]]) if position else 0
                assert parent != GARBAGE
                assert (step.positions[row], step.slot_mapping[row]) == (position, slots[position])
                pool[slots[position]] = self._prefix_id(parent, int(token_ids[row]))
                prefix_of_row.append(int(pool[slots[position]]))
                row += 1
        row = 0
        for slots, (context_len, query_len) in zip(places, lens, strict=True):
            context = pool[slots[:context_len]].tolist()
            prefix = list(self._prefixes[context[-1]])
            assert context == self.prefixes(prefix), "it attends to a prefix that is not its own"
            for num_tokens in range(context_len - query_len + 1, context_len + 1):
                if row in sample_rows:
                    samples.append(self.next_token(prefix[:num_tokens]))
                row += 1
        self._compute_states(step, [0, *prefix_of_row])
        for place, token_id in enumerate(only):
            samples[place] = samples[place] if token_id is None else token_id
        self.sampled = np.array(samples, np.int64)
        self.logprobs = (
            self._logprobs(step, np.array(prefix_of_row)) if step.wants_logprobs else None
        )
        return self.sampled

    def _compute_states(self, step: StepBatch, prefix_of_row: list[int]) -> None:
        """Go through the parts as a mixer does: the first decodes at once, whatever is behind them wave by wave."""
        parts = state_parts(step.state_parts, CPU)
        row = len(parts.decodes)
        reads = [*range(row)], parts.decodes.tolist()
        for part in sorted(parts.others, key=lambda part: part.start):
            assert part.start == row
            assert part.end > part.start
            row = part.end
        assert row == (len(step.token_ids) if len(self.states) else 0)
        for at, state in zip(*reads, strict=True):
            self._advance(prefix_of_row, at, at + 1, state, [state])
        for part in parts.others:
            written = [part.target, *([part.saved] if part.saved >= 0 else [])]
            self._advance(prefix_of_row, part.start, part.end, part.source, written)

    def _advance(
        self, prefix_of_row: list[int], start: int, end: int, source: int, written: list[int]
    ) -> None:
        state = 0 if source < 0 else int(self.states[source])
        for prefix_id in prefix_of_row[start + 1 : end + 1]:
            assert self._prefixes[state] == self._prefixes[prefix_id][:-1], (
                "its state is another prefix's"
            )
            state = prefix_id
        self.states[written] = state

    def _logprobs(self, step: StepBatch, prefix_of_row: NDArray[np.int64]) -> RowLogprobs:
        """Of what is wanted: the token in place of a log probability, its prefix's id in place of a rank."""
        wanted = np.flatnonzero(step.sample_tops != NOT_WANTED)
        tops = np.concatenate((step.sample_tops[wanted], step.scored_tops))
        rows = np.concatenate((step.sample_rows[wanted], step.scored_rows))
        token_ids = np.concatenate((self.sampled[wanted], step.scored_token_ids))
        starts = np.concatenate(([0], np.cumsum(np.minimum(tops, NUM_TOKENS))))
        filler = np.zeros(starts[-1])
        return RowLogprobs(
            token_ids.astype(np.float32),
            prefix_of_row[rows],
            starts,
            filler.astype(np.int32),
            filler.astype(np.float32),
        )

    def prefixes(self, token_ids: list[int]) -> list[int]:
        """The id of each prefix of these tokens."""
        ids, parent = [], 0
        for token_id in token_ids:
            parent = self._prefix_id(parent, token_id)
            ids.append(parent)
        return ids

    def next_token(self, token_ids: list[int]) -> int:
        """What the shadow model answers: 0, which ends a sequence, now and then."""
        draw = hash(tuple(token_ids)) % 26
        return 0 if draw == 0 else 1 + draw % (NUM_TOKENS - 1)

    def _prefix_id(self, parent: int, token_id: int) -> int:
        key = (parent, token_id)
        if key not in self._prefix_ids:
            self._prefix_ids[key] = len(self._prefixes)
            self._prefixes.append((*self._prefixes[parent], token_id))
        return self._prefix_ids[key]


class ShadowEngine:
    """Runs scheduled batches on a shadow of the device and checks every invariant on the way.

    The next token is a function of all before it: a preempted sequence must find the same one.

    overlap: launch a step before the tokens of the one before it are received, as Engine does.
    num_snapshots: of a model with states, None for one without.
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
        overlap: bool = False,
        batches_admissions: bool = False,
        make_forcing: Callable[[list[int]], Forcing | None] = lambda prompt: None,
        num_snapshots: int | None = None,
        make_drafts: Callable[[ShadowDevice], Drafts] | None = None,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            hash_block=hash_block,
            snapshots=None if num_snapshots is None else Snapshots(max_num_seqs, num_snapshots),
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            batches_admissions=batches_admissions,
        )
        self.overlap = overlap
        self.make_forcing = make_forcing
        num_states = 0 if num_snapshots is None else max_num_seqs + num_snapshots
        self.device = ShadowDevice(num_blocks, block_size, num_states)
        self.drafts = None if make_drafts is None else make_drafts(self.device)
        self.unfinished: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.num_overruns = 0  # computed tokens that were dropped
        self.num_preempted_pending = 0
        self.num_copied = 0
        self._launched: deque[Arrived] = (
            deque()
        )  # what each step in flight has sampled, and says of tokens
        self._num_added = 0

    def add(
        self, prompt: list[int], *, lane: int = 0, max_tokens: int = 4, **params: int | None
    ) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, **params)
        seq = Sequence(
            str(self._num_added),
            prompt,
            params,
            lane=lane,
            stop_token_ids=frozenset((0,)),
            forcing=self.make_forcing(prompt),
        )
        self._num_added += 1
        self.scheduler.add(seq)
        self.unfinished.append(seq)
        return seq

    def score(self, prompt: list[int], score_from: int, *, lane: int = 0) -> Sequence:
        targets = Targets(
            np.arange(score_from, len(prompt)), np.array(prompt[score_from:], np.int64)
        )
        seq = Sequence(str(self._num_added), prompt[:-1], NO_NEW_TOKEN, lane=lane, targets=targets)
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
        batch = self.scheduler.schedule(None if self._launched else self.drafts)
        self.admitted += [
            seq for seq in batch.prefills if seq in waiting
        ]  # in the order of their admission
        preempted = [seq for seq in self.unfinished if seq.status is SequenceStatus.WAITING]
        self.num_preempted_pending += any(seq.num_pending_tokens for seq in preempted)
        self._check_batch(batch)
        assert must_run is None or must_run in batch.seqs
        if batch.num_tokens:
            step = build_step_batch(batch, self.scheduler.slots)
            self._check_step(batch, step)
            self.num_copied += len(step.copy_from)
            only = [seq.forced_sample for seq in batch.sampling]
            self._launched.append((self.device.compute(step, only), self.device.logprobs))
            self.scheduler.advance(batch)
        if fails:
            if batch.num_tokens:
                self.device.pool.reshape(-1)[step.slot_mapping] = GARBAGE
                self.device.states[step.repeatable().kept_states] = GARBAGE
            self._launched.clear()
            self.scheduler.withdraw()
        while len(self._launched) > (self.overlap and batch.num_tokens > 0):
            self._receive(*self._launched.popleft())
        self.check()
        return batch

    def drain(self) -> None:
        """Step until all is finished; nothing may starve or loop."""
        longest = self.scheduler.max_model_len
        bound = 2 * longest * (len(self.unfinished) + 1)
        while self.unfinished or self._launched:
            in_flight = len(self._launched)
            assert self.step().num_tokens > 0 or in_flight
            bound -= 1
            assert bound > 0, f"still unfinished: {self.unfinished}"
        assert not self.scheduler.running
        assert not self.scheduler.num_waiting
        assert self.blocks.num_free_blocks == self.blocks.num_blocks

    def check(self) -> None:
        """Blocks, references and tables agree; the slot arrays repeat the sequences' state."""
        scheduler, slots = self.scheduler, self.scheduler.slots
        check_accounting(scheduler)
        running = [seq for seq in self.unfinished if seq.status is SequenceStatus.RUNNING]
        assert sorted(map(id, running)) == sorted(map(id, scheduler.running))
        assert len({seq.slot for seq in running}) == len(running) <= scheduler.max_num_seqs
        assert slots.num_free == scheduler.max_num_seqs - len(running)
        order = [(seq.lane, seq.arrival) for seq in scheduler.running]
        assert order == sorted(order)
        for seq in running:
            assert slots.token_ids[seq.slot, : len(seq.token_ids)].tolist() == seq.token_ids
            assert slots.num_known[seq.slot] == len(seq.token_ids)
            assert slots.block_tables[seq.slot, : len(seq.block_table)].tolist() == seq.block_table
            assert slots.num_tokens[seq.slot] == seq.num_tokens < seq.max_len + (not seq.generates)
            assert slots.num_computed[seq.slot] == seq.num_computed_tokens < seq.num_tokens
        for seq in self.unfinished:
            assert seq.num_pending_tokens in ((0, 1) if self._launched else (0,))
            assert seq.status is SequenceStatus.RUNNING or not (
                seq.block_table or seq.num_computed_tokens
            )
            if seq.generates:
                assert (seq.status is SequenceStatus.ENDING) == (seq.num_tokens == seq.max_len)

    def _must_run(self) -> Sequence | None:
        """The sequence of lane 0 that waits alone there, if only later lanes hold anything."""
        queue = self.scheduler.waiting.get(0, ())
        if len(queue) != 1 or any(seq.lane == 0 for seq in self.scheduler.running):
            return None
        return None if any(n >= 19 for n in self.scheduler._overtakes.values()) else queue[0]

    def _check_batch(self, batch: ScheduledBatch) -> None:
        scheduler = self.scheduler
        num_new = batch.num_new_tokens.tolist()
        num_guesses = Counter({each.seq: len(each.guesses) for each in batch.drafted})
        assert sum(num_new) == batch.num_tokens <= scheduler.max_num_batched_tokens
        assert len({id(seq) for seq in batch.seqs}) == len(num_new)
        for seq, n in zip(batch.seqs, num_new, strict=True):
            assert seq.status is SequenceStatus.RUNNING
            assert 0 < n <= seq.num_tokens - seq.num_computed_tokens + num_guesses[seq]

    def _check_step(self, batch: ScheduledBatch, step: StepBatch) -> None:
        """Two sequences never write one slot, and nobody writes what others may read."""
        assert len(set(step.slot_mapping.tolist())) == len(step.slot_mapping)
        published = {block.block_id for block in batch.published}
        assert not set(step.slot_mapping.tolist()) & set(step.copy_from.tolist())
        sources = Counter(copy.source for copy in batch.copies)
        for block_id in {slot // self.blocks.block_size for slot in step.slot_mapping.tolist()}:
            holders = self.blocks._blocks[block_id].ref_count - sources[block_id]
            assert holders == 1 or block_id in published
        if not self.overlap:
            assert not len(step.pending_rows)

    def _receive(self, sampled: NDArray[np.int64], logprobs: RowLogprobs | None) -> None:
        batch = self.scheduler.in_flight[0]
        self.num_overruns += sum(seq.status is SequenceStatus.FINISHED for seq in batch.sampling)
        done = self.scheduler.receive(sampled, logprobs)
        self.finished += done
        self.unfinished = [seq for seq in self.unfinished if seq not in done]
