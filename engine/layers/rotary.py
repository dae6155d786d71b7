"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + dim / 2) of each head by position * theta^(-2i / dim). Source: arXiv:2104.09864.

    The angles of all positions are computed in float32 once and kept in the model's dtype, on the device:
    `table` [positions, 2, dim], cosines and sines. The table is no weight, so it is built here, not loaded.
    """

    table: Tensor

    def __init__(
        self, head_dim: int, max_positions: int, theta: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, 1.0 / theta**exponents)
        angles = torch.cat((angles, angles), dim=-1)
        self.table = torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens] int64 -> cosines and sines, each [tokens, 1, dim], the same for all layers."""
        cos, sin = self.table[positions].unsqueeze(2).unbind(1)
        return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, dim] -> the same, rotated."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
