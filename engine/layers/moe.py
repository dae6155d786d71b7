"""Mixture of experts: a router chooses a few gated MLPs for each token, computed in groups of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.adapter_rows import AdapterRows
from engine.attention.layer_kernels import ExpertKernels, LayerKernels
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import WeightMismatch
from engine.layers.linear import ReplicatedLinear
from engine.layers.onednn import linear, pack_weight
from engine.layers.parallel import TensorParallel
from engine.layers.stream import ClampedSwigluAndMul, GatedActivation
from engine.layers.weighted_module import WeightedModule, fill


@dataclass(frozen=True)
class ExpertGroups:
    """Choices of experts sorted by expert: the rows of a grouped product.

    tokens: [rows] int64, whose choice a row is.  places: [tokens, experts of a token] int64, the row of each
    choice.  ends: [experts] int32, where each expert's rows end.
    """

    tokens: Tensor
    places: Tensor
    ends: Tensor

    @classmethod
    def of(
        cls, chosen: Tensor, num_experts: int, kernels: ExpertKernels | None = None
    ) -> ExpertGroups:
        """Sort chosen: [tokens, experts of a token] int64, without reading it on the host."""
        if kernels is not None:
            return cls(*kernels.group(chosen, num_experts))
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(max(len(order), num_experts), device=chosen.device)
        places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
        ends = torch.searchsorted(experts, numbers[:num_experts], right=True, out_int32=True)
        return cls(order // chosen.shape[1], places.view_as(chosen), ends)

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Return (expert, first row, row after its last) of the experts with rows; the host waits."""
        ends = self.ends.tolist()
        starts = [0, *ends]
        return [(i, starts[i], end) for i, end in enumerate(ends) if end > starts[i]]


class GroupedLinear(nn.Module):
    """Multiplies row r of x by its expert's transposed weight, and adds its bias.

    The backend's kernel takes one launch for all experts; without it they go one by one, packed where that pays.
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
        """Multiply x [rows, in], sorted by expert.  bias: [experts, out] -> [rows, out]."""
        if self.product is not None:
            return self.product(x, self.weight, bias, groups.ends)
        products = [
            linear(x[start:end], self.weights[i], None if bias is None else bias[i])
            for i, start, end in groups.spans
        ]
        return torch.cat(products) if products else x.new_empty(0, self.weights[0].shape[0])


#: An expert's matrices in a checkpoint that has each by itself: Qwen's names and Mixtral's.
MATRICES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
EXPERT_MATRIX = re.compile(rf"(0|[1-9]\d{{0,5}})\.({'|'.join(MATRICES)})\.weight")


@dataclass(frozen=True)
class Experts:
    """The experts of one layer, and how a token chooses among them.

    num_experts, num_chosen: all of them, and those that a token goes through.
    intermediate_size: of each expert's MLP.
    normalised: a token's weights sum to 1; otherwise they are the softmax over all experts.
    bias: the router and every projection of the experts add one.
    swiglu: alpha and limit of ClampedSwigluAndMul, None for silu(gate) * up.
    shared_size: of the MLP that every token goes through, multiplied by the sigmoid of a gate; 0 without.
    interleaved: a checkpoint's tensors are [experts, in, out] with gate and up columns alternating (gpt-oss);
        otherwise [experts, out, in], the rows of gate before those of up.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalised: bool
    bias: bool = False
    swiglu: tuple[float, float] | None = None
    interleaved: bool = False
    shared_size: int = 0


def choose_experts(scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Choose experts by scores [tokens, experts]: weights, float32, and ids, int64, [tokens, chosen] each.

    Softmax over all, cut to the chosen and divided by their sum (Mixtral), equals softmax over the chosen (gpt-oss).
    """
    scores = scores.float()
    best, chosen = scores.topk(num_chosen, dim=-1)
    if normalised:
        return best.softmax(-1), chosen
    return (best - scores.logsumexp(-1, keepdim=True)).exp(), chosen


class ExpertMLPs(WeightedModule):
    """The experts' down(activation(gate_up(x))), this rank's share of their intermediate columns.

    gate_up_proj: [experts, 2 * columns, hidden], the rows of gate first.  down_proj: [experts, hidden,
    columns].  gate_up_proj_bias, down_proj_bias: [experts, rows of the weight], None without.
    """

    def __init__(
        self,
        experts: Experts,
        hidden_size: int,
        tp: TensorParallel,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels | None,
    ) -> None:
        super().__init__()
        self.experts, self.tp = experts, tp
        self.kernels = None if kernels is None else kernels.experts
        self.columns = tp.share(experts.intermediate_size, "intermediate columns of an expert")
        rows = 2 * self.columns.length

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(experts.num_experts, *shape, dtype=dtype), requires_grad=False
            )

        self.gate_up_proj = parameter(rows, hidden_size)
        self.down_proj = parameter(hidden_size, self.columns.length)
        self.gate_up_proj_bias = parameter(rows) if experts.bias else None
        self.down_proj_bias = parameter(hidden_size) if experts.bias else None
        self.activation: nn.Module = GatedActivation("silu", kernels)
        if experts.swiglu is not None:
            self.activation = ClampedSwigluAndMul(*experts.swiglu, kernels)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum each token's experts. x: [tokens, hidden]; weights, chosen: [tokens, chosen] -> [tokens, hidden]."""
        groups = ExpertGroups.of(chosen, self.experts.num_experts, self.kernels)
        rows = self.gate_up(x.index_select(0, groups.tokens), self.gate_up_proj_bias, groups)
        # so that the sum over the ranks has the bias once
        bias = self.down_proj_bias if self.tp.rank == 0 else None
        rows = self.down(self.activation(rows), bias, groups)
        # gathers, multiplies and adds in one pass, in float32; separate ops took 2 to 9 times as long
        sums = F.embedding_bag(
            groups.places, rows, mode="sum", per_sample_weights=weights.to(rows.dtype)
        )
        return self.tp.all_reduce(sums)

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Find also each expert's own matrices, by the names of Qwen's and of Mixtral's."""
        if found := EXPERT_MATRIX.fullmatch(name):
            expert, part = int(found[1]), MATRICES[found[2]]
            if expert >= self.experts.num_experts:
                return None
            return "down_proj" if part == "down" else "gate_up_proj", f"{expert}.{part}"
        return super().place_of(name)

    def shards_of(self, name: str) -> tuple[str | None, ...]:
        """List each expert's matrices in parameter `name`; a bias is one tensor."""
        parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
        if name not in parts:
            return (None,)
        return tuple(f"{i}.{part}" for i in range(self.experts.num_experts) for part in parts[name])

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's share of `tensor` into parameter `name`.

        shard: "3.gate", "3.up" or "3.down" for that matrix of expert 3; None for a tensor of all experts.
        """
        place = self.get_parameter(name)
        if shard is not None:
            expert, _, part = shard.partition(".")
            start = self.columns.length if part == "up" else 0
            dim = 1 if part == "down" else 0
            fill(
                place[int(expert)].narrow(dim, start, self.columns.length),
                self.columns.read(tensor, dim),
            )
            return
        shape = self._stored_shape(name)
        turned = (*shape[:1], *shape[:0:-1])  # as gpt-oss and Qwen3-VL-MoE have matrices
        if (
            tensor.shape != (turned if self.experts.interleaved else shape)
            and tensor.shape != turned
        ):
            raise WeightMismatch(f"shape {list(tensor.shape)} found, {list(shape)} expected")
        is_turned = self.experts.interleaved or tensor.shape != shape
        for i in range(
            self.experts.num_experts
        ):  # one at a time: all of them together may be gigabytes
            whole = tensor.part(slice(i, i + 1))[0]
            place[i].copy_(self._own_share(name, whole.t() if is_turned else whole))

    def finish_loading(self) -> None:
        """Hand the weights to the grouped layers."""
        self.gate_up = GroupedLinear(self.gate_up_proj, self.kernels)
        self.down = GroupedLinear(self.down_proj, self.kernels)
        del self.gate_up_proj, self.down_proj  # the layers may hold packed copies

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        experts, hidden = self.experts.num_experts, self.down_proj.shape[1]
        rows, columns = (
            (hidden, self.columns.total) if "down" in name else (2 * self.columns.total, hidden)
        )
        return (experts, rows) if name.endswith("bias") else (experts, rows, columns)

    def _own_share(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of one expert's matrix [out, in] or bias."""
        own = slice(self.columns.start, self.columns.start + self.columns.length)
        if name.startswith("gate_up"):
            gate, up = (whole[::2], whole[1::2]) if self.experts.interleaved else whole.chunk(2)
            return torch.cat((gate[own], up[own]))
        return whole if name.endswith("bias") else whole[:, own]


class SparseMLP(nn.Module):
    """A router, on every rank, and its experts, in the place of an MLP.

    shared_expert: computes rows beside them, see Experts.
    """

    def __init__(
        self,
        experts: Experts,
        hidden_size: int,
        tp: TensorParallel,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels | None,
        shared_expert: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.shared_expert = shared_expert
        if shared_expert is not None:
            self.shared_expert_gate = ReplicatedLinear(hidden_size, 1, bias=False, dtype=dtype)
        self.num_chosen, self.normalised = experts.num_chosen, experts.normalised
        fused = None if kernels is None else kernels.experts
        self.choose = choose_experts if fused is None else fused.choose
        self.gate = ReplicatedLinear(
            hidden_size, experts.num_experts, bias=experts.bias, dtype=dtype
        )
        self.experts = ExpertMLPs(experts, hidden_size, tp, dtype=dtype, kernels=kernels)

    def forward(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Send hidden [tokens, hidden] through the chosen experts -> [tokens, hidden].

        adapters: of the shared expert; the others have none.
        """
        if len(hidden) == 0:  # the last block of a step in which no row samples
            return hidden
        weights, chosen = self.choose(
            self.gate(hidden), self.num_chosen, normalised=self.normalised
        )
        output: Tensor = self.experts(hidden, weights, chosen)
        if self.shared_expert is not None:
            output += self.shared_expert_gate(hidden).sigmoid() * self.shared_expert(
                hidden, adapters
            )
        return output
