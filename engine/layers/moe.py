"""Mixture of experts: a router chooses a few gated MLPs for each token. Each expert computes its tokens together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.adapter_rows import AdapterRows
from engine.attention.layer_kernels import LayerKernels, PackedKernels
from engine.checkpoint.quantized import PackableTensor, QuantizedTensor
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import WeightMismatch
from engine.layers.grouped_linear import ExpertGroups, GroupedLinear, PackedGroupedLinear
from engine.layers.linear import ReplicatedLinear
from engine.layers.packed import Place, shared_layout
from engine.layers.parallel import TensorParallel
from engine.layers.stream import ClampedSwigluAndMul, GatedActivation
from engine.layers.weighted_module import LoadPacked, WeightedModule, fill

#: An expert's matrices in a checkpoint that has each by itself: Qwen's names and Mixtral's.
MATRICES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
#: The matrices of an expert that each parameter holds.
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
EXPERT_MATRIX = re.compile(rf"(0|[1-9]\d{{0,5}})\.({'|'.join(MATRICES)})\.weight")


@dataclass(frozen=True)
class Experts:
    """The experts of one layer, and how a token chooses among them.

    num_experts: all experts of the layer.  num_chosen: the experts that each token goes through.
    intermediate_size: the intermediate size of each expert's MLP.
    normalised: a token's weights sum to 1; otherwise they are the softmax over all experts.
    bias: the router and every projection of the experts have a bias.
    swiglu: alpha and limit of ClampedSwigluAndMul, None for silu(gate) * up.
    shared_size: the intermediate size of the shared expert, 0 if there is none. It is an MLP that every token goes
        through, and its output is multiplied by the sigmoid of a gate.
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
    """The experts' down(activation(gate_up(x))), with this rank's share of their intermediate columns.

    gate_up_proj: [experts, 2 * columns, hidden], the rows of gate first.  down_proj: [experts, hidden,
    columns].  gate_up_proj_bias, down_proj_bias: [experts, rows of the weight], None without.
    packed: layers that hold weights in 4 or 8 bits while they are loaded, by the name of the parameter they replace.
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
        self.experts = experts
        self.tp = tp
        self.hidden_size = hidden_size
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
        self.packed = nn.ModuleDict()
        self.activation: nn.Module = GatedActivation("silu", kernels)
        if experts.swiglu is not None:
            self.activation = ClampedSwigluAndMul(*experts.swiglu, kernels)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum experts' outputs by weight. x [tokens, hidden], weights, chosen [tokens, chosen] -> [tokens, hidden]."""
        groups = ExpertGroups.of(chosen, self.experts.num_experts, self.kernels)
        rows = self.gate_up(x.index_select(0, groups.tokens), self.gate_up_proj_bias, groups)
        # one rank adds the bias, so that the sum over the ranks has it once
        bias = self.down_proj_bias if self.tp.rank == 0 else None
        rows = self.down(self.activation(rows), bias, groups)
        # gathers, multiplies and adds in one pass, in float32; separate ops took 2 to 9 times as long
        sums = F.embedding_bag(
            groups.places, rows, mode="sum", per_sample_weights=weights.to(rows.dtype)
        )
        return self.tp.all_reduce(sums)

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Find also the tensors of one expert's matrix, by the names that Qwen and Mixtral give them."""
        if found := EXPERT_MATRIX.fullmatch(name):
            expert = int(found[1])
            part = MATRICES[found[2]]
            if expert >= self.experts.num_experts:
                return None
            parameter = "down_proj" if part == "down" else "gate_up_proj"
            return parameter, f"{expert}.{part}"
        return (name, None) if name in PARTS else super().place_of(name)

    def shards_of(self, name: str) -> tuple[str | None, ...]:
        """Return the shards of parameter `name`: each expert's matrices; one shard for the biases of all experts."""
        if name not in PARTS:
            return (None,)
        return tuple(f"{i}.{part}" for i in range(self.experts.num_experts) for part in PARTS[name])

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
        # gpt-oss and Qwen3-VL-MoE store [in, out]
        transposed_shape = (shape[0], *reversed(shape[1:]))
        expected = [transposed_shape] if self.experts.interleaved else [shape, transposed_shape]
        if tensor.shape not in expected:
            raise WeightMismatch(f"shape {list(tensor.shape)} found, {list(shape)} expected")
        is_transposed = self.experts.interleaved or tensor.shape != shape
        # one expert at a time: all of them together may be gigabytes
        for i in range(self.experts.num_experts):
            whole = tensor.part(slice(i, i + 1))[0]
            place[i].copy_(self._own_share(name, whole.t() if is_transposed else whole))

    def keep_packed(
        self, name: str, tensors: Mapping[str | None, PackableTensor], kernels: PackedKernels
    ) -> LoadPacked | None:
        """Keep all experts' matrices packed if they are quantized alike, in a form that the kernels multiply with."""
        if set(tensors) not in ({None}, set(self.shards_of(name))):
            return None
        experts, rows, columns = self._stored_shape(name)
        for shard, tensor in tensors.items():
            part_rows = rows // len(PARTS[name])
            expected = (experts, columns, rows) if shard is None else (part_rows, columns)
            if tensor.shape != expected:
                return None
        places = [self._packed_place(part) for part in PARTS[name]]
        _, own_rows, own_columns = self.get_parameter(name).shape
        layout = shared_layout(tensors.values(), places, own_columns, kernels)
        if layout is None:
            return None
        with torch.device("meta"):
            self.packed[name] = PackedGroupedLinear(layout, experts, own_columns, own_rows, kernels)
        delattr(self, name)
        return partial(self._load_packed, name)

    def _load_packed(self, name: str, tensor: PackableTensor, shard: str | None) -> None:
        """Copy this rank's rows and columns of one expert's matrix, or of all experts', without unpacking them."""
        packed = self.packed[name]
        assert isinstance(packed, PackedGroupedLinear)
        group = packed.layout.form.group
        if isinstance(tensor, QuantizedTensor):
            assert shard is not None
            expert, _, part = shard.partition(".")
            place = self._packed_place(part)
            matrix_part = tensor.packed_part(place.rows, place.columns, group)
            packed.fill(int(expert), place.start, matrix_part)
            return
        assert group is not None
        for part in PARTS[name]:
            place = self._packed_place(part)
            rows = self._stored_rows(part, place.rows)
            for i in range(self.experts.num_experts):
                matrix_part = tensor.packed_part(i, rows, place.columns, group)
                packed.fill(i, place.start, matrix_part)

    def finish_loading(self) -> None:
        """Hand the weights to the grouped layers."""
        self.gate_up = self._grouped_layer("gate_up_proj")
        self.down = self._grouped_layer("down_proj")

    def _grouped_layer(self, name: str) -> nn.Module:
        """Return a layer that takes over the weights of a parameter, and may hold copies in another layout."""
        if name not in self.packed:
            weight = self.get_parameter(name)
            delattr(self, name)
            assert isinstance(weight, nn.Parameter)
            return GroupedLinear(weight, self.kernels)
        packed = self.packed.pop(name)
        assert isinstance(packed, PackedGroupedLinear)
        packed.finish_loading()
        return packed

    def _packed_place(self, part: str) -> Place:
        """Return the place of this rank's share of an expert's matrix. part: "gate", "up" or "down"."""
        own = slice(self.columns.start, self.columns.start + self.columns.length)
        whole = slice(0, self.hidden_size)
        if part == "down":
            return Place(0, whole, own)
        return Place(self.columns.length if part == "up" else 0, own, whole)

    def _stored_rows(self, part: str, rows: slice) -> slice:
        """Return where `rows` of an expert's matrix `part` are in a tensor of all experts, which stacks gate and up."""
        if part == "down":
            return rows
        if self.experts.interleaved:
            first = 1 if part == "up" else 0
            return slice(2 * rows.start + first, 2 * rows.stop, 2)
        first = self.columns.total if part == "up" else 0
        return slice(first + rows.start, first + rows.stop)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        experts, hidden = self.experts.num_experts, self.hidden_size
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
        if name.endswith("bias"):
            return whole  # the bias of down is over the hidden size, which is not split
        return whole[:, own]


class SparseMLP(nn.Module):
    """A router and its experts, in the place of an MLP. Every rank has the whole router.

    shared_expert: the MLP that every token goes through besides its chosen experts.
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
        self.num_chosen = experts.num_chosen
        self.normalised = experts.normalised
        fused = None if kernels is None else kernels.experts
        self.choose = choose_experts if fused is None else fused.choose
        self.gate = ReplicatedLinear(
            hidden_size, experts.num_experts, bias=experts.bias, dtype=dtype
        )
        self.experts = ExpertMLPs(experts, hidden_size, tp, dtype=dtype, kernels=kernels)

    def forward(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Send hidden [tokens, hidden] through the chosen experts -> [tokens, hidden].

        adapters: for the shared expert; the chosen experts have no adapters.
        """
        if len(hidden) == 0:  # in the last layer, when no row of the step samples
            return hidden
        weights, chosen = self.choose(
            self.gate(hidden), self.num_chosen, normalised=self.normalised
        )
        output: Tensor = self.experts(hidden, weights, chosen)
        if self.shared_expert is not None:
            gate = self.shared_expert_gate(hidden).sigmoid()
            output += gate * self.shared_expert(hidden, adapters)
        return output
