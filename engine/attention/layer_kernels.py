"""The seam for fused kernels: what layers may use in place of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ChooseExperts(Protocol):
    """choose_experts of engine/layers/moe.py."""

    def __call__(self, scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class ExpertKernels:
    """One launch for each step of a mixture of experts, and no wait for the device.

    choose: weights and ids of each token's experts.
    group(chosen, num_experts) -> the fields of ExpertGroups, in their order.
    product(x, weight, bias or None, ends) -> the experts' linear layers over rows sorted by expert.
    clamped_swiglu_and_mul(gate_up, alpha, limit) -> as ClampedSwigluAndMul.
    """

    choose: ChooseExperts
    group: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
    product: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    clamped_swiglu_and_mul: Callable[[Tensor, float, float], Tensor]


@dataclass(frozen=True)
class LayerKernels:
    """One fused kernel for each place where plain torch takes several passes over the same numbers.

    add_rms_norm(x, residual, weight, eps) -> (norm of x + residual, x + residual).
    norm_and_rotate(query, key, (cos, sin), norm weights of both or None, eps) -> (query, key). Cosines and
    sines may be narrower than a head, whose other numbers are not rotated then.
    silu_and_mul(gate_up) -> silu(gate) * up.
    rms_norm(x, weight, eps) -> norm of x; gelu_and_mul(gate_up) -> gelu(gate) * up, gelu by tanh. None where
    a backend has none of its own: plain torch then.
    experts: for mixtures of them, None where a backend has none.
    Shapes are those of the layers: RMSNorm, RotaryEmbedding and SiluAndMul.
    """

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    norm_and_rotate: Callable[
        [Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None, float], tuple[Tensor, Tensor]
    ]
    silu_and_mul: Callable[[Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    gelu_and_mul: Callable[[Tensor], Tensor] | None = None
    experts: ExpertKernels | None = None
