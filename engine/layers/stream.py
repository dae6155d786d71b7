"""The residual stream, with the norms and activations around it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer_kernels import LayerKernels
from engine.checkpoint.weights import CheckpointTensor
from engine.layers.parallel import Share, TensorParallel
from engine.layers.weighted_module import WeightedModule, fill


class RMSNorm(WeightedModule):
    """x / rms(x) * weight, the mean square in float32. weight: [dim]. Source: arXiv:1910.07467.

    A float32 weight multiplies before the rounding to x's dtype, a weight in x's dtype after it.
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
        """Normalise x [..., dim] over the last dimension, in x's dtype."""
        if self.kernels is not None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return self._scaled(x, x.float().square().mean(-1, keepdim=True))

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual)."""
        if self.kernels is not None:
            return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
        residual = x + residual
        return self.forward(residual), residual

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy the checkpoint's `tensor` into parameter `name`, and add the offset."""
        fill(self.weight, tensor.whole())
        self.weight.add_(self.offset)

    def _scaled(self, x: Tensor, mean_square: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        if self.weight.dtype == torch.float32:
            return (normed * self.weight).to(x.dtype)
        return normed.to(x.dtype) * self.weight


class ParallelRMSNorm(RMSNorm):
    """RMSNorm over features that are split over the ranks: the mean square is over the features of all ranks.

    share: this rank's features; several ranks may hold the same ones.
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
        """Normalise x [tokens, this rank's features] over the features of all ranks."""
        if self.tp.size == 1:
            return super().forward(x)
        # if several ranks hold the same features, all features count equally often, and the mean stays right
        mean_square = self.tp.all_reduce(x.float().square().mean(-1, keepdim=True)) / self.tp.size
        return self._scaled(x, mean_square)

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's part of `tensor` into parameter `name`."""
        fill(self.weight, self.share.read(tensor, 0))


class GatedActivation(nn.Module):
    """activation(gate) * up, over the output of a merged gate and up projection.

    name: "silu" or "gelu_pytorch_tanh", as in config.json. The latter is gelu's approximation with tanh.
    """

    def __init__(self, name: str, kernels: LayerKernels | None = None) -> None:
        super().__init__()
        self.is_gelu = name == "gelu_pytorch_tanh"
        self.fused = None
        if kernels is not None:
            self.fused = kernels.gelu_and_mul if self.is_gelu else kernels.silu_and_mul

    def forward(self, gate_up: Tensor) -> Tensor:
        """Activate gate_up [tokens, 2 * dim] -> [tokens, dim]."""
        if self.fused is not None:
            return self.fused(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.gelu(gate, approximate="tanh") if self.is_gelu else F.silu(gate)
        return activated * up


class ClampedSwigluAndMul(nn.Module):
    """gate * sigmoid(alpha * gate) * (up + 1), after up is clamped to -limit..limit and gate to at most `limit`.

    Source: gpt-oss, https://github.com/openai/gpt-oss, torch/model.py.
    """

    def __init__(self, alpha: float, limit: float, kernels: LayerKernels | None = None) -> None:
        super().__init__()
        self.alpha = alpha
        self.limit = limit
        experts = None if kernels is None else kernels.experts
        self.fused = None if experts is None else experts.clamped_swiglu_and_mul

    def forward(self, gate_up: Tensor) -> Tensor:
        """Activate gate_up [tokens, 2 * dim] -> [tokens, dim]."""
        if self.fused is not None:
            return self.fused(gate_up, self.alpha, self.limit)
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # of gated MLPs


@dataclass(frozen=True)
class Stream:
    """The residual stream of a step's tokens: `total` plus, if there is one, the output `pending`.

    Both are [tokens, hidden]. The next norm adds `pending` in its own pass.
    """

    total: Tensor
    pending: Tensor | None = None

    def normed(self, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Return the stream, normalised if there is a norm, and the stream itself."""
        if norm is None:
            total = self.total if self.pending is None else self.pending + self.total
            return total, total
        if self.pending is None:
            return norm(self.total), self.total
        return norm.add_and_norm(self.pending, self.total)


class NormPair(NamedTuple):
    """The norms before and after attention or MLP; None for one that the model lacks.

    before: of the residual stream.  after: of the output, before it joins the stream.
    """

    before: RMSNorm | None
    after: RMSNorm | None

    def joined(self, total: Tensor, output: Tensor) -> Stream:
        """Return the stream of `total`, to which the output, normalised by `after`, is still to be added."""
        return Stream(total, output if self.after is None else self.after(output))
