"""Linear layers of many experts over rows that are sorted by expert, by what is fastest where they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer_kernels import ExpertKernels
from engine.layers.packed import linear, pack_weight

GROUPED_MM_CAPABILITIES = (9, 10)  # major; on others torch waits for the device and loops over the experts
GROUPED_MM_ALIGNMENT = 8  # numbers of a row, 16 bytes


@dataclass(frozen=True)
class ExpertGroups:
    """A step's choices of experts, sorted by expert: the rows of a grouped product.

    tokens: [rows] int64, whose choice a row is.  places: [tokens, experts of a token] int64, the row of each
    choice.  experts: [rows] int64, ascending.  ends: [experts] int32, where each expert's rows end.
    """

    tokens: Tensor
    places: Tensor
    experts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, kernels: ExpertKernels | None = None) -> ExpertGroups:
        """chosen: [tokens, experts of a token] int64. Nothing of it is read by the host."""
        if kernels is not None:
            return cls(*kernels.group(chosen, num_experts))
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(max(len(order), num_experts), device=chosen.device)
        places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
        ends = torch.searchsorted(experts, numbers[:num_experts], right=True, out_int32=True)
        return cls(order // chosen.shape[1], places.view_as(chosen), experts, ends)

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(expert, first row, row after its last) of the experts that have rows, on the host: it waits."""
        ends = self.ends.tolist()
        starts = [0, *ends]
        return [(i, starts[i], end) for i, end in enumerate(ends) if end > starts[i]]

    def weighted_sums(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows: [rows, dim], sorted by expert; weights: [tokens, experts of a token] -> [tokens, dim]."""
        # gathers, multiplies and adds in one pass, in float32; separate ops took 2 to 9 times as long
        return F.embedding_bag(self.places, rows, mode="sum", per_sample_weights=weights.to(rows.dtype))


class GroupedLinear(nn.Module, ABC):
    """Row r of x times the transposed weight of its expert, plus its bias."""

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        """x: [rows, in], sorted by expert.  bias: [experts, out] -> [rows, out]."""


def grouped_linear(weight: nn.Parameter, kernels: ExpertKernels | None) -> GroupedLinear:
    """The fastest for a weight [experts, out, in], which is its own from now on.

    On a GPU one launch for all experts, which a graph can record: torch's where it has one, else the
    backend's. On a CPU, and where there is neither, one expert after the other.
    """
    if _serves_grouped_mm(weight):
        return TorchGroupedLinear(weight)
    if kernels is not None:
        return KernelGroupedLinear(weight, kernels.product)
    return LinearForEachExpert(weight)


def _serves_grouped_mm(weight: Tensor) -> bool:
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    aligned = all(size % GROUPED_MM_ALIGNMENT == 0 for size in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(weight.device)[0] in GROUPED_MM_CAPABILITIES


class TorchGroupedLinear(GroupedLinear):
    """torch._grouped_mm."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        product: Tensor = torch._grouped_mm(x, self.weight.transpose(1, 2), groups.ends)
        return product if bias is None else product.add_(bias[groups.experts])


class KernelGroupedLinear(GroupedLinear):
    """The backend's own kernel."""

    def __init__(
        self, weight: nn.Parameter, product: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.weight = weight
        self.product = product

    def forward(self, x: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        return self.product(x, self.weight, bias, groups.ends)


class LinearForEachExpert(GroupedLinear):
    """Linear layers of those experts that have rows, their weights packed where that pays."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            pack_weight(nn.Parameter(matrix, requires_grad=False)) for matrix in weight
        )

    def forward(self, x: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        products = [
            linear(x[start:end], self.weights[i], None if bias is None else bias[i])
            for i, start, end in groups.spans
        ]
        return torch.cat(products) if products else x.new_empty(0, self.weights[0].shape[0])
