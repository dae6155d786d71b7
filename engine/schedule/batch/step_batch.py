"""StepBatch: a step's tokens as host arrays, cut out of the slot table, and how its rows are to be sampled.

Numpy alone: it becomes a ForwardBatch where the model is, in the same process or in each rank of a
tensor-parallel engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.batch.edit_batch import build_logit_edits
from engine.schedule.batch.pooled_rows import find_pooled
from engine.schedule.batch.scheduled_batch import ScheduledBatch
from engine.schedule.batch.scored_tokens import find_scored, sample_tops
from engine.schedule.batch.slots import SlotTable


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one step, sequence after sequence, as numpy arrays.

    token_ids: [tokens] int64.  positions: [tokens] int64, each token's place in its sequence.
    slot_mapping: [tokens] int64, block_id * block_size + offset, where its keys and values go.
    sample_rows: [samples] int64, the rows whose logits are wanted.
    block_tables: [seqs, max_blocks] int32.  context_lens, query_lens: [seqs] int64, the tokens each sequence
    has once this step is computed, and how many of them are in it.
    pending_rows, pending_samples: [pending] int64, the rows whose token was not known when the step was
    built, and which sample of the step launched before is that token. token_ids holds anything there.
    slots, generations: [seqs] int64, the slot of each sequence and the number of its giving, as in SlotTable;
    empty in steps that are no scheduler's.
    sample_tops: [samples] int64, how many of the most likely tokens' log probabilities are wanted beside that
    of each sampled one, NOT_WANTED where none is; empty if none is of any.
    copy_from, copy_to: [copied] int64, slots whose keys and values are copied first; none is in both.
    scored_rows, scored_token_ids, scored_tops: [scored] int64, rows whose distribution says how likely the
    given token was, and the same of it.
    pooled_rows: [pooled] int64, rows whose hidden states are pooled, those of a sequence one after another.
    pooled_counts: [pooled seqs] int64, how many of each.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    context_lens: NDArray[np.int64]
    query_lens: NDArray[np.int64]
    pending_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pending_samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    generations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sample_tops: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    scored_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    scored_token_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    scored_tops: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pooled_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pooled_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    copy_from: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    copy_to: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def wants_logprobs(self) -> bool:
        """Whether any are."""
        return len(self.sample_tops) > 0 or len(self.scored_rows) > 0

    @property
    def gives_tokens_alone(self) -> bool:
        """Whether it is to say nothing more: no log probabilities, no pooled states."""
        return not self.wants_logprobs and not len(self.pooled_rows)


def build_step_batch(batch: ScheduledBatch, slots: SlotTable) -> StepBatch:
    """Cut the scheduled tokens out of the slot table."""
    rows, num_new = batch.slots, batch.num_new_tokens
    context_lens = slots.num_computed[rows] + num_new
    ends = np.cumsum(num_new)
    token_rows, positions = rows, context_lens - 1
    if batch.prefills:
        token_rows = np.repeat(rows, num_new)
        positions = np.arange(ends[-1]) + np.repeat(context_lens - ends, num_new)
    blocks = slots.block_tables[token_rows, positions // slots.block_size]
    max_blocks = -(-int(context_lens.max()) // slots.block_size)
    scored, pooled = find_scored(batch, slots), find_pooled(batch, slots)
    copy_from, copy_to = _copied_slots(batch, slots.block_size)
    is_pending = context_lens > slots.num_known[rows]  # its last token, which is then the last of its rows
    return StepBatch(
        token_ids=slots.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * slots.block_size + positions % slots.block_size,
        sample_rows=ends[batch.samples] - 1,
        block_tables=slots.block_tables[:, :max_blocks].take(rows, axis=0),
        context_lens=context_lens,
        query_lens=num_new,
        pending_rows=ends[is_pending] - 1,
        pending_samples=slots.sample_place[rows[is_pending]],
        slots=rows,
        generations=slots.generations[rows],
        sample_tops=sample_tops(batch, slots),
        scored_rows=scored.rows,
        scored_token_ids=scored.token_ids,
        scored_tops=scored.tops,
        pooled_rows=pooled.rows,
        pooled_counts=pooled.counts,
        copy_from=copy_from,
        copy_to=copy_to,
    )


def _copied_slots(batch: ScheduledBatch, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not batch.copies:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    copies = np.array([(copy.source, copy.target, copy.num_tokens) for _, copy in batch.copies], np.int64)
    counts = copies[:, 2]
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    sources, targets = (np.repeat(blocks, counts) * block_size + offsets for blocks in copies[:, :2].T)
    return sources, targets


def build_sampling_batch(batch: ScheduledBatch, slots: SlotTable) -> SamplingBatch:
    """Cut the sampling values of the sequences that sample in this step out of the slot table."""
    rows = batch.sampling_slots
    position = slots.num_tokens[rows]
    edits, masks = build_logit_edits(batch, slots)
    return SamplingBatch(
        values=slots.sampling.take(rows),  # of a structured array a tenth of indexing's time
        position=position.astype(np.uint64),
        edits=edits,
        masks=masks,
    )
