"""RMSNorm, alone or with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.layer_kernels import LayerKernels
from engine.checkpoint.weights import CheckpointTensor
from engine.layers.base import WeightedModule, fill
from engine.layers.parallel import Share, TensorParallel


class RMSNorm(WeightedModule):
    """x / rms(x) * weight, the mean square in float32. weight: [dim]. Source: arXiv:1910.07467.

    A weight in float32 multiplies before the result is rounded to x's dtype, one in x's dtype after.
    offset: added to the weight that the checkpoint has.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels | None = None,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim], normalised over the last dimension, in x's dtype."""
        if self.kernels is not None and self.kernels.rms_norm is not None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return self._scaled(x, x.float().square().mean(-1, keepdim=True))

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual)."""
        if self.kernels is not None:
            return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
        residual = x + residual
        return self.forward(residual), residual

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy the checkpoint's `tensor` into parameter `name`, with the offset."""
        fill(self.weight, tensor.whole())
        self.weight.add_(self.offset)

    def _scaled(self, x: Tensor, mean_square: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        if self.weight.dtype == torch.float32:
            return (normed * self.weight).to(x.dtype)
        return normed.to(x.dtype) * self.weight


class ParallelRMSNorm(RMSNorm):
    """RMSNorm over features that are split over the ranks: the mean square is of all of them.

    share: this rank's features; several ranks may hold the same.
    """

    def __init__(
        self,
        share: Share,
        eps: float,
        tp: TensorParallel,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels | None = None,
    ) -> None:
        super().__init__(share.length, eps, dtype=dtype, kernels=kernels)
        self.share = share
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, this rank's features] -> the same, normalised over the features of all ranks."""
        if self.tp.size == 1:
            return super().forward(x)
        # ranks that hold the same features count them as often as there are such ranks
        mean_square = self.tp.all_reduce(x.float().square().mean(-1, keepdim=True)) / self.tp.size
        return self._scaled(x, mean_square)

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's part of `tensor` into parameter `name`."""
        fill(self.weight, self.share.read(tensor, 0))
