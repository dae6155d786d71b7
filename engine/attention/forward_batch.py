"""ForwardBatch: what one forward pass reads besides weights and KV cache, passed as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.base import AttentionMetadata


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step on the model's device, sequence after sequence.

    token_ids, positions, slot_mapping: [tokens] int64.  sample_rows: [samples] int64, as in StepBatch.
    attention: what the attention backend needs besides, made by that backend.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_rows: Tensor
    attention: AttentionMetadata
