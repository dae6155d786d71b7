"""Linear layers of many experts, over rows that are sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from engine.attention.layer_kernels import ExpertKernels, PackedKernels
from engine.checkpoint.packed_form import PackedPart
from engine.layers.onednn import linear, pack_weight
from engine.layers.packed import PackedLayout, empty_parts, fill_rows, frozen


@dataclass(frozen=True)
class ExpertGroups:
    """The rows of a grouped product: one for each token and expert that it goes through, sorted by expert.

    tokens: [rows] int64, the token of each row.  places: [tokens, experts of a token] int64, the row of each pair.
    ends: [experts] int32, where each expert's rows end.
    """

    tokens: Tensor
    places: Tensor
    ends: Tensor

    @classmethod
    def of(
        cls, chosen: Tensor, num_experts: int, kernels: ExpertKernels | None = None
    ) -> ExpertGroups:
        """Sort `chosen`, [tokens, experts of a token] int64, by expert. The host does not read it."""
        if kernels is not None:
            return cls(*kernels.group(chosen, num_experts))
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(max(len(order), num_experts), device=chosen.device)
        places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
        ends = torch.searchsorted(experts, numbers[:num_experts], right=True, out_int32=True)
        tokens = order // chosen.shape[1]
        return cls(tokens, places.view_as(chosen), ends)

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Return (expert, first row, row after its last) for each expert that has rows. Waits for the device."""
        ends = self.ends.tolist()
        starts = [0, *ends]
        return [(i, starts[i], end) for i, end in enumerate(ends) if end > starts[i]]


class GroupedLinear(nn.Module):
    """Multiplies row r of x by its expert's transposed weight, and adds its bias.

    The backend's kernel takes one launch for all experts. Without such a kernel, they are multiplied one by one, with
    weights packed by oneDNN where that is faster.
    """

    def __init__(self, weight: nn.Parameter, kernels: ExpertKernels | None) -> None:
        """Take over a weight [experts, out, in]."""
        super().__init__()
        self.product = None if kernels is None else kernels.product
        if self.product is not None:
            self.weight = weight
        else:
            matrices = (nn.Parameter(matrix, requires_grad=False) for matrix in weight)
            self.weights = nn.ParameterList(map(pack_weight, matrices))

    def forward(self, x: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        """Multiply x [rows, in] -> [rows, out]. The rows are sorted by expert.  bias: [experts, out]."""
        if self.product is not None:
            return self.product(x, self.weight, bias, groups.ends)
        products = [
            linear(x[start:end], self.weights[i], None if bias is None else bias[i])
            for i, start, end in groups.spans
        ]
        return torch.cat(products) if products else x.new_empty(0, self.weights[0].shape[0])


class PackedGroupedLinear(nn.Module):
    """Multiplies row r of x by its expert's transposed weight, which stays in 4 or 8 bits.

    words: [experts, out, words of a row, 4] uint8.  scales, zeros: [experts, out, groups]. Each expert's are as in
    PackedProduct. `finish_loading` lays them out as the kernel reads them.
    """

    def __init__(
        self,
        layout: PackedLayout,
        num_experts: int,
        in_features: int,
        out_features: int,
        kernels: PackedKernels,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.kernels = kernels
        self.out_features = out_features
        parts = empty_parts(layout.form, in_features, out_features)
        of_all_experts = (part.new_empty(num_experts, *part.shape) for part in parts)
        self.words, self.scales, self.zeros = map(frozen, of_all_experts)

    def forward(self, x: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        """Multiply x [rows, in] -> [rows, out]. The rows are sorted by expert.  bias: [experts, out]."""
        sizes = self.out_features, self.layout.block, self.layout.form.kind
        if self.kernels.grouped_product is not None:
            return self.kernels.grouped_product(
                x, self.words, self.scales, self.zeros, bias, groups.ends, *sizes
            )
        products = [
            self.kernels.product(
                x[start:end],
                self.words[i],
                self.scales[i],
                self.zeros[i],
                None if bias is None else bias[i],
                *sizes,
            )
            for i, start, end in groups.spans
        ]
        return torch.cat(products) if products else x.new_empty(0, self.out_features)

    def fill(self, expert: int, start: int, part: PackedPart) -> None:
        """Put rows of an expert's weight in their place, from row `start` on."""
        kind = self.layout.form.kind
        fill_rows(self.words[expert], self.scales[expert], self.zeros[expert], start, part, kind)

    def finish_loading(self) -> None:
        """Lay each expert's weight out as the kernel reads it."""
        # one expert at a time: a list of all copies would take the memory of all weights once more
        laid_out: list[Tensor] = []
        stored = zip(self.words.data, self.scales.data, self.zeros.data, strict=True)
        for i, expert in enumerate(stored):
            parts = self.kernels.lay_out(*expert)
            if not laid_out:
                laid_out = [part.new_empty(len(self.words), *part.shape) for part in parts]
            for of_all, part in zip(laid_out, parts, strict=True):
                of_all[i] = part
        self.words, self.scales, self.zeros = map(frozen, laid_out)
