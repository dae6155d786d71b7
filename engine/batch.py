"""What one forward pass reads besides weights and KV cache, passed as an argument.

A StepBatch is made where the scheduler is, out of numpy arrays alone, and becomes a ForwardBatch where the
model is: in the same process, or in each rank of a tensor-parallel engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.slots import SlotTable
from engine.upload import upload


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


@dataclass(frozen=True)
class ForwardBatch:
    """A StepBatch on the model's device: token_ids with no gap, positions, slot_mapping and sample_rows.

    attention: what the attention backend needs besides, made by that backend.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_rows: Tensor
    attention: AttentionMetadata


@dataclass(frozen=True)
class SamplingBatch:
    """How to choose one token for each row of a step's logits, as numpy arrays of [samples].

    temperature, top_p, min_p: float32; temperature 0 is greedy.  top_k: int64, 0 is off.
    seed, sample_index, position: uint64, the counter of the row's uniform; position counts all tokens before.
    banned: for a row, the token ids that may not be chosen yet.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    sample_index: NDArray[np.uint64]
    position: NDArray[np.uint64]
    banned: dict[int, list[int]]


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
        sample_rows=ends[context_lens == slots.num_tokens[rows]] - 1,
        block_tables=slots.block_tables[rows, :max_blocks],
        context_lens=context_lens,
        query_lens=num_new,
        pending_rows=ends[is_pending] - 1,
        pending_samples=slots.sample[rows[is_pending]],
    )


def to_device(
    step: StepBatch, backend: AttentionBackend, device: torch.device, sampled: Tensor | None = None
) -> ForwardBatch:
    """Copy a step's arrays to the model's device and let the backend prepare its own.

    sampled: [samples] int64 on the device, what the step launched before has chosen, for the pending rows.
    """
    token_ids, positions, slot_mapping, sample_rows = upload(
        [step.token_ids, step.positions, step.slot_mapping, step.sample_rows], device
    )
    fill_pending(token_ids, step, sampled)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        sample_rows=sample_rows,
        attention=backend.build_metadata(step.block_tables, step.context_lens, step.query_lens),
    )


def fill_pending(token_ids: Tensor, step: StepBatch, sampled: Tensor | None) -> None:
    """Write the tokens that the step launched before has sampled into this step's pending rows.

    token_ids: [tokens] int64, changed in place.  sampled: [samples] int64, on the same device.
    """
    if len(step.pending_rows):
        assert sampled is not None, "only a step that follows another has pending rows"
        rows, samples = upload([step.pending_rows, step.pending_samples], token_ids.device)
        token_ids[rows] = sampled[samples].clamp_(min=0)  # -1 is no token: what follows it is dropped


def build_sampling_batch(batch: ScheduledBatch, slots: SlotTable) -> SamplingBatch:
    """Cut the sampling values of the sequences that sample in this step out of the slot table."""
    rows = batch.slots
    rows = rows[slots.num_computed[rows] + batch.num_new_tokens == slots.num_tokens[rows]]
    position = slots.num_tokens[rows]
    early = np.flatnonzero(position < slots.min_len[rows])
    return SamplingBatch(
        temperature=slots.temperature[rows],
        top_p=slots.top_p[rows],
        top_k=slots.top_k[rows],
        min_p=slots.min_p[rows],
        seed=slots.seed[rows],
        sample_index=slots.sample_index[rows],
        position=position.astype(np.uint64),
        banned={int(i): sorted(slots.stop_token_ids[rows[i]]) for i in early},
    )
