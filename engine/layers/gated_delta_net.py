"""The gated delta net replaces attention by a short convolution and a matrix for each head, which each token corrects.

Source: arXiv:2412.06464. It is computed in chunks of tokens, by matrix products, as in arXiv:2406.06484.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer_kernels import LayerKernels
from engine.attention.state_pool import StateBreak, StateParts, StateShape
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import WeightMismatch
from engine.layers.linear import ReplicatedLinear, RowParallelLinear
from engine.layers.packed import Place
from engine.layers.parallel import Share, TensorParallel
from engine.layers.stream import NormPair, RMSNorm, Stream
from engine.layers.weighted_module import WeightedModule, fill

CHUNK = 64
NORM_EPS = 1e-6  # of queries' and keys' lengths, whatever config.json says


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a layer, or of one rank.

    num_heads: the heads of queries and of keys.  group: the heads of values that share a head of keys.
    key_dim, value_dim: the numbers of a head's key and of its value.  kernel_size: tokens that the convolution sees.
    eps: of the norm after the heads.
    interleaved: a checkpoint's tensors are ordered by head, and hold all matrices' rows of a head together.
    """

    num_heads: int
    group: int
    key_dim: int
    value_dim: int
    kernel_size: int
    eps: float
    interleaved: bool = False

    @property
    def rows(self) -> dict[str, int]:
        """Return how many numbers each projection has for a head.

        q, k and v are convolved. z is the gate of the output, b becomes the rate and a the decay.
        """
        values = self.group * self.value_dim
        return {
            "q": self.key_dim,
            "k": self.key_dim,
            "v": values,
            "z": values,
            "b": self.group,
            "a": self.group,
        }

    @property
    def num_channels(self) -> int:
        """Return how many of a head's numbers are convolved."""
        return 2 * self.key_dim + self.group * self.value_dim

    def share(self, tp: TensorParallel) -> "DeltaHeads":
        """Return this rank's heads. Raises ConfigError if the ranks cannot share them evenly."""
        return replace(self, num_heads=tp.share(self.num_heads, "key heads of a delta net").length)

    def states(self, layer: int, dtype: torch.dtype) -> list[StateShape]:
        """Return the shapes of a sequence's states.

        They are the tokens that the convolution sees again, and the heads' matrices, transposed.
        """
        seen = (self.num_heads, self.kernel_size - 1, self.num_channels)
        matrices = (self.num_heads, self.group, self.value_dim, self.key_dim)
        return [
            StateShape(layer, "conv_states", 0, seen, dtype),
            StateShape(layer, "recurrent_states", 0, matrices, torch.float32),
        ]


def fill_heads(
    place: Tensor, tensor: CheckpointTensor, sizes: Sequence[int], heads: Share, *, together: bool
) -> None:
    """Copy this rank's heads out of a tensor that holds several matrices. Raises WeightMismatch for another size.

    place: [heads, rows, ...].  sizes: each matrix's rows for a head.
    together: in the tensor, a head's rows of all matrices are adjacent; otherwise a matrix's rows of all heads are.
    """
    period = sum(sizes)
    row_shape = tensor.shape[1:]
    if tensor.shape[:1] != (heads.total * period,):
        raise WeightMismatch(
            f"shape {list(tensor.shape)} found, {heads.total * period} rows expected"
        )
    slices = []
    begin = 0
    for size in [period] if together else sizes:
        rows = tensor.read(0, begin + heads.start * size, heads.length * size)
        slices.append(rows.view(heads.length, size, *row_shape))
        begin += heads.total * size
    fill(place, torch.cat(slices, dim=1))


class DeltaProjection(ReplicatedLinear):
    """All projections of the input as one layer.

    Its rows are ordered by head, of this rank's heads; each head has the rows that DeltaHeads.rows counts.
    """

    def __init__(
        self, in_features: int, heads: DeltaHeads, share: Share, *, dtype: torch.dtype
    ) -> None:
        super().__init__(
            in_features, share.length * sum(heads.rows.values()), bias=False, dtype=dtype
        )
        self.heads = heads
        self.share = share
        self.shards = ("qkvz", "ba") if heads.interleaved else ("qkv", "z", "b", "a")

    def places_of(self, shape: tuple[int, ...], shard: str | None) -> list[Place]:
        """Return nothing: heads are gathered from several places, so the weight does not stay packed."""
        return []

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy the matrices that `shard` names, one letter each: keys of DeltaHeads.rows."""
        assert shard is not None
        rows = self.heads.rows
        sizes = [rows[kind] for kind in shard]
        kinds_before = list(rows)[: list(rows).index(shard[0])]
        start = sum(rows[kind] for kind in kinds_before)
        rows_of_heads = self.weight.view(self.share.length, -1, self.in_features)
        place = rows_of_heads[:, start : start + sum(sizes)]
        fill_heads(place, tensor, sizes, self.share, together=self.heads.interleaved)


class GatedDeltaNet(WeightedModule):
    """One layer's gated delta net, with this rank's heads."""

    def __init__(
        self,
        heads: DeltaHeads,
        hidden_size: int,
        tp: TensorParallel,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels | None,
    ) -> None:
        super().__init__()
        self.heads = heads.share(tp)
        self.share = tp.share(heads.num_heads, "key heads of a delta net")
        self.in_proj = DeltaProjection(hidden_size, heads, self.share, dtype=dtype)
        width = heads.num_heads * heads.group * heads.value_dim
        self.out_proj = RowParallelLinear(width, hidden_size, tp, bias=False, dtype=dtype)
        self.norm = RMSNorm(heads.value_dim, heads.eps, dtype=torch.float32)

        def parameter(*shape: int) -> nn.Parameter:
            weight = torch.empty(self.share.length, *shape, dtype=torch.float32)
            return nn.Parameter(weight, requires_grad=False)

        self.conv1d = parameter(heads.num_channels, 1, heads.kernel_size)
        self.A_log = parameter(heads.group)
        self.dt_bias = parameter(heads.group)
        self.mix = mix if kernels is None or kernels.delta_net is None else kernels.delta_net

    def forward(
        self,
        stream: Stream,
        norms: NormPair,
        parts: StateParts | StateBreak | None,
        memory: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> Stream:
        """Return the residual stream after this layer, only its `rows` if given.

        memory: the pool's states of this layer.
        """
        assert parts is not None, "a model with states has parts in each step"
        normed, total = stream.normed(norms.before)

        def compute(x: Tensor, parts: StateParts) -> Tensor:
            mixed: Tensor = self.mix(x, memory, parts, self.weights, self.heads)
            return mixed

        x = self.in_proj(normed)
        if isinstance(parts, StateBreak):
            heads = self.heads
            width = heads.num_heads * heads.group * heads.value_dim
            mixed = parts.mix(x, width, compute)
        else:
            mixed = compute(x, parts)
        if rows is not None:
            mixed = mixed[rows]
            total = total[rows]
        return norms.joined(total, self.out_proj(mixed))

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Find also the convolution's weight, which a checkpoint names conv1d.weight."""
        return super().place_of(name.removesuffix(".weight"))

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's part of `tensor` into parameter `name`."""
        rows = self.heads.rows
        kinds = "qkv" if name == "conv1d" else "a"  # A_log and dt_bias have a's rows
        sizes = [rows[kind] for kind in kinds]
        fill_heads(self.get_parameter(name), tensor, sizes, self.share, together=False)

    def finish_loading(self) -> None:
        """Lay out the weights as `mix` reads them."""
        conv = self.conv1d.squeeze(2).mT.contiguous()
        self.weights = (conv, -self.A_log.exp(), self.dt_bias.data, self.norm.weight.data)


def mix(
    x: Tensor,
    memory: Sequence[Tensor],
    parts: StateParts,
    weights: Sequence[Tensor],
    heads: DeltaHeads,
) -> Tensor:
    """Compute between input and output projection: x [tokens, heads * rows] -> [tokens, heads * group * value_dim].

    memory: the states in the pool, [rows, *shape] each; they are advanced by all parts of the batch.
    weights: float32, the convolution's [heads, kernel, channels], decay and its bias [heads, group], norm [value_dim].
    """
    x = x.view(len(x), heads.num_heads, -1)
    out = x.new_empty(len(x), heads.num_heads * heads.group * heads.value_dim)
    num_decodes = len(parts.decodes)
    if num_decodes:
        before = [pool.index_select(0, parts.decodes) for pool in memory]
        mixed, after = _advance(x[:num_decodes, None], before, weights, heads)
        out[:num_decodes] = mixed[:, 0]
        for pool, values in zip(memory, after, strict=True):
            pool.index_copy_(0, parts.decodes, values)
    for part in parts.others:
        if part.source >= 0:
            before = [pool[part.source, None] for pool in memory]
        else:
            before = [torch.zeros_like(pool[:1]) for pool in memory]
        mixed, after = _advance(x[None, part.start : part.end], before, weights, heads)
        out[part.start : part.end] = mixed[0]
        written_rows = (part.target, part.saved) if part.saved >= 0 else (part.target,)
        for row in written_rows:
            for pool, values in zip(memory, after, strict=True):
                pool[row] = values[0]
    return out


def _advance(
    x: Tensor, before: Sequence[Tensor], weights: Sequence[Tensor], heads: DeltaHeads
) -> tuple[Tensor, Any]:
    """Compute tokens x [sequences, tokens, heads, rows] after the states `before` -> (output, the new states)."""
    x = x.transpose(1, 2)  # head by head from here on
    rows_of = heads.rows
    other_sizes = [rows_of[kind] for kind in ("z", "b", "a")]
    mixed, z, b, a = torch.split(x, [heads.num_channels, *other_sizes], dim=-1)
    conv, decay, dt_bias, norm = weights
    seen = torch.cat((before[0], mixed), dim=2)
    kernel = conv.mT.flatten(0, 1)[:, None]
    convolved = F.silu(F.conv1d(seen.float().mT.flatten(1, 2), kernel, groups=len(kernel)))
    convolved = convolved.view(*x.shape[:2], heads.num_channels, -1).mT[:, :, None]
    convolved_sizes = [rows_of[kind] for kind in ("q", "k", "v")]
    query, key, values = torch.split(convolved, convolved_sizes, dim=-1)

    def of_group(rows: Tensor) -> Tensor:
        return rows.reshape(*x.shape[:3], heads.group, -1).transpose(2, 3)

    def of_length_one(rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + NORM_EPS)

    query = of_length_one(query) * heads.key_dim**-0.5
    key = of_length_one(key)
    decay = decay[:, None] * F.softplus(a.float() + dt_bias[:, None])
    rate = b.float().sigmoid().mT[..., None]
    decay = decay.mT[..., None]
    inputs = (query, key, of_group(values), rate, decay)
    state = before[1].mT
    chunks = []
    for start in range(0, x.shape[2], CHUNK):
        output, state = _chunk(state, *(tensor[..., start : start + CHUNK, :] for tensor in inputs))
        chunks.append(output)
    out = torch.cat(chunks, dim=-2)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + heads.eps) * norm
    gated = (out * F.silu(of_group(z).float())).to(x.dtype)
    after = (seen[:, :, x.shape[2] :], state.mT)
    return gated.permute(0, 3, 1, 2, 4).flatten(2), after


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, values: Tensor, rate: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a chunk of tokens after a state [..., key_dim, value_dim] -> (output, the new state).

    query, key, values, rate, decay: [..., tokens, numbers]. decay is a logarithm.
    """
    total = decay.cumsum(-2)  # from the start of the chunk to each token
    is_later = torch.ones(
        total.shape[-2], total.shape[-2], dtype=torch.bool, device=key.device
    ).triu(1)
    # faded[i, j]: how much is left at token i of what token j added
    faded = (total - total.mT).masked_fill(is_later, -torch.inf).exp()
    # a token adds its values, less what the state and the earlier tokens already hold for its key
    corrected = key * rate
    wanted = values * rate - (corrected * total.exp()) @ state
    added = torch.linalg.solve_triangular(
        (corrected @ key.mT) * faded, wanted, upper=False, unitriangular=True
    )
    out = (query * total.exp()) @ state + ((query @ key.mT) * faded) @ added
    last = total[..., -1:, :]
    return out, state * last.exp() + (key * (last - total).exp()).mT @ added
