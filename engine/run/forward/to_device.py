"""Where a step leaves the host: its arrays go to the model's device, and the step before fills their gaps."""

from __future__ import annotations

import torch

from engine.attention.base import KernelBackend
from engine.attention.forward_batch import ForwardBatch
from engine.run.forward.pending_tokens import Sampled
from engine.sampling.sampling_batch import SamplingBatch
from engine.sampling.sampling_rows import SamplingRows, sampling_columns
from engine.schedule.batch.step_batch import StepBatch


def to_device(
    step: StepBatch,
    backend: KernelBackend,
    device: torch.device,
    sampled: Sampled | None = None,
    sampling: SamplingBatch | None = None,
) -> tuple[ForwardBatch, SamplingRows | None]:
    """Copy a step's arrays to the model's device, with those that the backend needs and its sampling values.

    sampled: what the step launched before has chosen, for the pending rows.
    """
    pending, places = step.pending_rows, step.pending_samples
    if len(pending):
        assert sampled is not None, "only a step that follows another has pending rows"
        places = sampled.places[places]
    arrays = [step.token_ids, step.positions, step.slot_mapping, step.sample_rows, pending, places]
    columns = [] if sampling is None else sampling_columns(sampling)
    attention, tensors = backend.build_and_upload(
        step.block_tables, step.context_lens, step.query_lens, [*arrays, *columns], device
    )
    token_ids, positions, slot_mapping, sample_rows, rows, places_on_device, *values = tensors
    if sampled is not None and len(pending):
        backend.fill_pending(token_ids, rows, sampled.token_ids, places_on_device)
    batch = ForwardBatch(token_ids, positions, slot_mapping, sample_rows, attention)
    return batch, SamplingRows(*values) if values else None
