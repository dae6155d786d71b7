"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.rotary_scaling import Rope


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + dim / 2) of a head's first `dim` numbers by position * frequency of the pair.

    The angles of all positions are computed in float32 once and kept in `dtype`, on the device:
    `table` [positions, 2, dim], cosines and sines. The table is no weight, so it is built here, not loaded.
    Source: arXiv:2104.09864.
    """

    table: Tensor

    def __init__(self, rope: Rope, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """max_positions: tokens that no sequence exceeds."""
        super().__init__()
        frequencies, factor = rope.frequencies(max_positions)
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies.to(device))
        angles = torch.cat((angles, angles), dim=-1)
        self.table = torch.stack((angles.cos().mul_(factor), angles.sin().mul_(factor)), dim=1).to(dtype)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens] int64 -> cosines and sines, each [tokens, 1, dim], the same for many layers."""
        cos, sin = self.table[positions].unsqueeze(2).unbind(1)
        return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim] -> the same, rotated; beyond the width of cos and sin as it is."""
    turning, still = x.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = (turning * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned
