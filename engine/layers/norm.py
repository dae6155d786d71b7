"""RMSNorm, alone or with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.layer_kernels import LayerKernels
from engine.layers.base import WeightedModule


class RMSNorm(WeightedModule):
    """x / rms(x) * weight, the mean square in float32. weight: [dim]. Source: arXiv:1910.07467."""

    def __init__(
        self, dim: int, eps: float, *, dtype: torch.dtype, kernels: LayerKernels | None = None
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim], normalised over the last dimension, in x's dtype."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual)."""
        if self.kernels is not None:
            return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
        residual = x + residual
        return self.forward(residual), residual
