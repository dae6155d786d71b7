"""The gated delta net: in place of attention a short convolution, and for each head a matrix that tokens correct.

Source: arXiv:2412.06464; in parts of CHUNK tokens by matrix products, as arXiv:2406.06484 has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer_kernels import LayerKernels
from engine.attention.state_pool import StateParts, StateShape
from engine.checkpoint.weights import CheckpointTensor
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear, Stack, WeightedModule, fill, fill_rows
from engine.layers.parallel import TensorParallel
from engine.layers.stream import NormPair, RMSNorm, Stream, StreamProducts

CHUNK = 64
NORM_EPS = 1e-6  # of queries' and keys' lengths, whatever config.json says


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a layer, or of one rank.

    num_heads: of queries and keys.  group: heads of values that share one of them, one behind the other.
    key_dim, value_dim: of a head.  kernel_size: tokens that the convolution sees.  eps: of the norm behind.
    interleaved: a checkpoint's tensors have the rows of a head and its values together, head after head.
    """

    num_heads: int
    group: int
    key_dim: int
    value_dim: int
    kernel_size: int
    eps: float
    interleaved: bool = False

    @property
    def num_values(self) -> int:
        """Return the heads of values."""
        return self.num_heads * self.group

    @property
    def widths(self) -> list[int]:
        """Return the columns of queries, keys and values, which are convolved; of z, and of b and a."""
        keys, values = self.num_heads * self.key_dim, self.num_values * self.value_dim
        return [keys, keys, values, values, self.num_values, self.num_values]

    @property
    def num_channels(self) -> int:
        """Return how many columns are convolved."""
        return sum(self.widths[:3])

    def share(self, tp: TensorParallel) -> "DeltaHeads":
        """Return those of this rank. Raises ConfigError."""
        return replace(self, num_heads=tp.share(self.num_heads, "key heads of a delta net").length)

    def states(self, layer: int, dtype: torch.dtype) -> list[StateShape]:
        """Return a sequence's states: tokens that the convolution sees again, and each head's matrix, transposed."""
        seen = (self.kernel_size - 1, self.num_channels)
        matrices = (self.num_values, self.value_dim, self.key_dim)
        return [
            StateShape(layer, "conv_states", 0, seen, dtype),
            StateShape(layer, "recurrent_states", 0, matrices, torch.float32),
        ]


class DeltaWeights(NamedTuple):
    """Weights beside the projections, float32: conv [kernel, channels]; decay, dt_bias [values]; norm [value_dim]."""

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


class GatedDeltaNet(WeightedModule):
    """One layer's gated delta net, this rank's heads of it."""

    def __init__(
        self,
        heads: DeltaHeads,
        hidden_size: int,
        tp: TensorParallel,
        products: StreamProducts,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels | None,
    ) -> None:
        super().__init__()
        self.heads, self.products = heads.share(tp), products
        keys = tp.share(heads.num_heads, "key heads of a delta net")
        self.values = keys.times(heads.group)
        key, value = keys.times(heads.key_dim), self.values.times(heads.value_dim)
        self.channels = {"q": key, "k": key, "v": value}
        rows = {**self.channels, "z": value, "b": self.values, "a": self.values}
        stacks = {"qkv": Stack("qkv")}
        if heads.interleaved:
            stacks = {names: Stack(names, heads.num_heads) for names in ("qkvz", "ba")}
        self.in_proj = ColumnParallelLinear(hidden_size, rows, bias=False, dtype=dtype, stacks=stacks)
        width = heads.num_values * heads.value_dim
        self.out_proj = RowParallelLinear(width, hidden_size, tp, bias=False, dtype=dtype)
        self.norm = RMSNorm(heads.value_dim, heads.eps, dtype=torch.float32)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)

        self.conv1d = parameter(self.heads.num_channels, 1, heads.kernel_size)
        self.A_log, self.dt_bias = parameter(self.values.length), parameter(self.values.length)
        fused = None if kernels is None else kernels.delta_net
        self.mix = mix if fused is None else fused

    def forward(
        self,
        stream: Stream,
        norms: NormPair,
        parts: StateParts | None,
        memory: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> Stream:
        """Return the residual stream behind it, or of those `rows` alone. memory: the pool's states of this layer."""
        assert parts is not None, "a model with states has parts in each step"
        x, total = self.products.after_norm(stream, norms.before, self.in_proj)
        mixed = self.mix(x, memory, parts, self.weights, self.heads)
        if rows is not None:
            mixed, total = mixed[rows], total[rows]
        return self.products.add(mixed, self.out_proj, norms.after, total)

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Find the convolution's weight under the checkpoint's name too."""
        return super().place_of(name.removesuffix(".weight"))

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's part of `tensor` into parameter `name`."""
        place = self.get_parameter(name)
        if name == "conv1d":
            fill_rows(place, tensor, self.channels, "qkv")
        else:
            fill(place, self.values.read(tensor, 0))

    def finish_loading(self) -> None:
        """Lay out the weights as they are read."""
        conv = self.conv1d.squeeze(1).t().contiguous()
        self.weights = DeltaWeights(conv, -self.A_log.exp(), self.dt_bias.data, self.norm.weight.data)

    def prepare(self, norm: RMSNorm | None) -> None:
        """Fold the norm before into the products; once, before weights are packed."""
        self.products.prepare(norm, self.in_proj, self.out_proj)


def mix(x: Tensor, memory: Sequence[Tensor], parts: StateParts, weights: DeltaWeights, heads: DeltaHeads) -> Tensor:
    """Compute all between both projections: x [tokens, sum(heads.widths)] -> [tokens, values * value_dim].

    memory: the states in the pool, [rows, *shape] each, which move on by all parts of the batch.
    """
    out = x.new_empty(len(x), heads.num_values * heads.value_dim)
    num_decodes = len(parts.decodes)
    if num_decodes:
        before = [kept.index_select(0, parts.decodes) for kept in memory]
        mixed, after = _advance(x[:num_decodes, None], before, weights, heads)
        out[:num_decodes] = mixed[:, 0]
        for kept, values in zip(memory, after, strict=True):
            kept.index_copy_(0, parts.decodes, values)
    for part in parts.others:
        before = [kept[part.source, None] if part.source >= 0 else torch.zeros_like(kept[:1]) for kept in memory]
        mixed, after = _advance(x[None, part.start : part.end], before, weights, heads)
        out[part.start : part.end] = mixed[0]
        for row in (part.target, part.saved):
            for kept, values in zip(memory, after, strict=True):
                if row >= 0:
                    kept[row] = values[0]
    return out


def _advance(x: Tensor, before: Sequence[Tensor], weights: DeltaWeights, heads: DeltaHeads) -> tuple[Tensor, Any]:
    """Compute x [sequences, tokens, columns], behind such states -> (output, the states after)."""
    mixed, z, b, a = torch.split(x, [heads.num_channels, *heads.widths[3:]], dim=-1)
    seen = torch.cat((before[0], mixed), dim=1)
    kernel = weights.conv.t()[:, None]
    convolved = F.silu(F.conv1d(seen.float().mT, kernel, groups=len(kernel)).mT)
    query, key, value = torch.split(convolved, heads.widths[:3], dim=-1)

    def by_head(rows: Tensor, dim: int) -> Tensor:
        return rows.view(*rows.shape[:2], -1, dim).transpose(1, 2)

    def unit(rows: Tensor) -> Tensor:
        each = by_head(rows, heads.key_dim)
        each = each * torch.rsqrt(each.square().sum(-1, keepdim=True) + NORM_EPS)
        return each.repeat_interleave(heads.group, dim=1)

    query, key, value = unit(query) * heads.key_dim**-0.5, unit(key), by_head(value, heads.value_dim)
    rate, decay = b.float().sigmoid().mT, (weights.decay * F.softplus(a.float() + weights.dt_bias)).mT
    state, chunks = before[1].mT, []
    for start in range(0, x.shape[1], CHUNK):
        tokens = (each[:, :, start : start + CHUNK] for each in (query, key, value, rate, decay))
        found, state = _chunk(state, *tokens)
        chunks.append(found)
    out = torch.cat(chunks, dim=2).transpose(1, 2)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + heads.eps) * weights.norm
    gated = out.flatten(2) * F.silu(z.float())
    return gated.to(x.dtype), (seen[:, -before[0].shape[1] :], state.mT)


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, rate: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute tokens behind a state [..., key_dim, value_dim] -> (output, the state after).

    query, key: [..., tokens, key_dim].  value: [..., tokens, value_dim].  rate, decay: [..., tokens], the latter a
    logarithm.
    """
    total = decay.cumsum(-1)[..., None]
    is_later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=key.device).triu(1)
    faded = (total - total.mT).masked_fill(is_later, -torch.inf).exp()
    corrected = key * rate[..., None]
    system = (corrected @ key.mT) * faded
    wanted = value * rate[..., None] - (corrected * total.exp()) @ state
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (query * total.exp()) @ state + ((query @ key.mT) * faded) @ added
    last = total[..., -1:, :]
    return out, state * last.exp() + (key * (last - total).exp()).mT @ added
