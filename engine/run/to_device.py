"""Where a step leaves the host: its arrays go to the model's device, and the step before fills their gaps."""

from __future__ import annotations

import torch

from engine.attention.base import KernelBackend
from engine.attention.forward_batch import ForwardBatch
from engine.kernels.upload import upload
from engine.run.pending_tokens import Sampled
from engine.schedule.step_batch import StepBatch


def to_device(
    step: StepBatch, backend: KernelBackend, device: torch.device, sampled: Sampled | None = None
) -> ForwardBatch:
    """Copy a step's arrays to the model's device and let the backend prepare its own.

    sampled: what the step launched before has chosen, for the pending rows.
    """
    pending, places = step.pending_rows, step.pending_samples
    if len(pending):
        assert sampled is not None, "only a step that follows another has pending rows"
        places = sampled.places[places]
    token_ids, positions, slot_mapping, sample_rows, rows, places_on_device = upload(
        [step.token_ids, step.positions, step.slot_mapping, step.sample_rows, pending, places], device
    )
    if sampled is not None and len(pending):
        # -1 is no token: what follows it is dropped
        token_ids[rows] = sampled.token_ids[places_on_device].clamp_(min=0)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        sample_rows=sample_rows,
        attention=backend.build_metadata(step.block_tables, step.context_lens, step.query_lens),
    )
