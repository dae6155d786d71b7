"""Activations of merged layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer_kernels import LayerKernels


class SiluAndMul(nn.Module):
    """silu(gate) * up, over the output of a merged gate and up projection."""

    def __init__(self, kernels: LayerKernels | None = None) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up: [tokens, 2 * dim] -> [tokens, dim]."""
        if self.kernels is not None:
            return self.kernels.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class ClampedSwigluAndMul(nn.Module):
    """gate * sigmoid(alpha * gate) * (up + 1), both clamped to `limit` before, the gate from above alone.

    Source: gpt-oss, https://github.com/openai/gpt-oss, torch/model.py.
    """

    def __init__(self, alpha: float, limit: float, kernels: LayerKernels | None = None) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit
        experts = None if kernels is None else kernels.experts
        self.fused = None if experts is None else experts.clamped_swiglu_and_mul

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up: [tokens, 2 * dim] -> [tokens, dim]."""
        if self.fused is not None:
            return self.fused(gate_up, self.alpha, self.limit)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


class GeluAndMul(nn.Module):
    """gelu(gate) * up, gelu by its approximation with tanh."""

    def __init__(self, kernels: LayerKernels | None = None) -> None:
        super().__init__()
        self.fused = None if kernels is None else kernels.gelu_and_mul

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up: [tokens, 2 * dim] -> [tokens, dim]."""
        if self.fused is not None:
            return self.fused(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


#: By their names in config.json.
ACTIVATIONS: dict[str, type[SiluAndMul | GeluAndMul]] = {"silu": SiluAndMul, "gelu_pytorch_tanh": GeluAndMul}
