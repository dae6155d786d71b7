"""Activations of merged layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    """silu(gate) * up, over the output of a merged gate and up projection."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up: [tokens, 2 * dim] -> [tokens, dim]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
