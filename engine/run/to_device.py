"""Where a step leaves the host: its arrays go to the model's device, and the step before fills their gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import KernelBackend
from engine.attention.forward_batch import ForwardBatch
from engine.kernels.upload import upload
from engine.schedule.step_batch import StepBatch


def to_device(
    step: StepBatch, backend: KernelBackend, device: torch.device, sampled: Tensor | None = None
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
