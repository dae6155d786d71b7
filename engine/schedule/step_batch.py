"""StepBatch: a step's tokens as host arrays, cut out of the slot table, and how its rows are to be sampled.

Numpy alone: it becomes a ForwardBatch where the model is, in the same process or in each rank of a
tensor-parallel engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.slots import SlotTable


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


def build_step_batch(batch: ScheduledBatch, slots: SlotTable) -> StepBatch:
    """Cut the scheduled tokens out of the slot table."""
    rows, num_new = batch.slots, batch.num_new_tokens
    ends = np.cumsum(num_new)
    computed = slots.num_computed[rows]
    positions = np.arange(ends[-1]) + np.repeat(computed - ends + num_new, num_new)
    token_rows = np.repeat(rows, num_new)
    blocks = slots.block_tables[token_rows, positions // slots.block_size]
    context_lens = computed + num_new
    max_blocks = -(-int(context_lens.max()) // slots.block_size)
    is_pending = context_lens > slots.num_known[rows]  # its last token, which is then the last of its rows
    return StepBatch(
        token_ids=slots.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * slots.block_size + positions % slots.block_size,
        sample_rows=ends[batch.samples] - 1,
        block_tables=slots.block_tables[rows, :max_blocks],
        context_lens=context_lens,
        query_lens=num_new,
        pending_rows=ends[is_pending] - 1,
        pending_samples=slots.sample_place[rows[is_pending]],
    )


def build_sampling_batch(batch: ScheduledBatch, slots: SlotTable) -> SamplingBatch:
    """Cut the sampling values of the sequences that sample in this step out of the slot table."""
    rows = batch.slots[batch.samples]
    position = slots.num_tokens[rows]
    early = np.flatnonzero(position < slots.min_len[rows]).tolist()
    banned = [(i, token_id) for i in early for token_id in slots.stop_token_ids[rows[i]]]
    return SamplingBatch(
        values=slots.sampling[rows],
        position=position.astype(np.uint64),
        banned=np.array(banned, np.int64).reshape(-1, 2),
    )
