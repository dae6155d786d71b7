"""Linear layers: whole, or split over ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.attention.adapter_rows import AdapterRows
from engine.attention.layer_kernels import PackedKernels
from engine.checkpoint.quantized import PackableTensor, QuantizedTensor
from engine.checkpoint.weights import CheckpointTensor
from engine.errors import WeightMismatch
from engine.layers.int8 import Int8Product, QuantizeRows
from engine.layers.onednn import linear, pack_weight
from engine.layers.packed import PackedProduct, Place, pack_product
from engine.layers.parallel import Share, TensorParallel
from engine.layers.row_tiles import TiledProduct
from engine.layers.weighted_module import LoadPacked, WeightedModule, fill


class ReplicatedLinear(WeightedModule):
    """y = x W^T + b, with the whole weight on every rank. weight: [out, in].

    instead: what multiplies in place of the weight, if anything; a TiledProduct only in a deterministic engine.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
            if bias
            else None
        )
        self.instead: Int8Product | PackedProduct | TiledProduct | None = None

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Multiply x [tokens, in] -> [tokens, out], and add the products of `adapters`."""
        return self.product(x, self.bias, adapters)

    def product(
        self, x: Tensor, bias: Tensor | None, adapters: AdapterRows | None = None
    ) -> Tensor:
        """x W^T + b of this rank, and what adapters add. x: [tokens, in] -> [tokens, out]."""
        y = linear(x, self.weight, bias) if self.instead is None else self.instead(x, bias)
        if adapters is not None:
            adapters.add_to(y, self, x)
        return y

    def places_of(self, shape: tuple[int, ...], shard: str | None) -> list[Place]:
        """Return the places of the parts of a packed matrix that this layer takes; none if it has another shape."""
        if shape != (self.out_features, self.in_features):
            return []
        return [Place(0, slice(0, self.out_features), slice(0, self.in_features))]

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Return the parameter and shard that a tensor fills. A packed weight is no parameter, but has its place."""
        return (name, None) if name == "weight" else super().place_of(name)

    def keep_packed(
        self, name: str, tensors: Mapping[str | None, PackableTensor], kernels: PackedKernels
    ) -> LoadPacked | None:
        """Keep the weight packed if all its shards are quantized alike, in a form that the kernels multiply with."""
        if set(tensors) not in ({None}, set(self.shards)):
            return None
        places = []
        for shard, tensor in tensors.items():
            of_shard = self.places_of(tensor.shape, shard)
            if not of_shard:
                return None
            places += of_shard
        product = pack_product(
            tensors.values(), places, self.in_features, self.out_features, kernels
        )
        if product is None:
            return None
        self.instead = product
        del self.weight
        return self._load_packed

    def _load_packed(self, tensor: PackableTensor, shard: str | None) -> None:
        """Copy this rank's rows and columns of `tensor` to their places without unpacking them."""
        assert isinstance(self.instead, PackedProduct)
        assert isinstance(tensor, QuantizedTensor)
        for place in self.places_of(tensor.shape, shard):
            part = tensor.packed_part(place.rows, place.columns, self.instead.form.group)
            self.instead.fill(place.start, part)

    def quantize(self, quantize_rows: QuantizeRows) -> None:
        """Replace the loaded weight by one in int8. Call this at most once, before the weight is packed."""
        self.instead = Int8Product(self.weight, quantize_rows)
        del self.weight

    def finish_loading(self) -> None:
        """Pack the weight where that pays."""
        if isinstance(self.instead, PackedProduct):
            self.instead.finish_loading()
        elif self.instead is None:
            self.weight = pack_weight(self.weight)


class ColumnParallelLinear(ReplicatedLinear):
    """Output features are split over the ranks: the layer takes the whole x and returns this rank's part of y.

    rows: by shard name, this rank's share of each matrix. The matrices take the same input and are stacked here.
    """

    def __init__(
        self, in_features: int, rows: dict[str, Share], *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(
            in_features, sum(share.length for share in rows.values()), bias=bias, dtype=dtype
        )
        self.rows = rows
        self.shards = tuple(rows)

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's rows of `tensor` into the rows of `shard`; if that is None, `tensor` stacks all shards."""
        total = sum(share.total for share in self._shares_of(shard))
        if tensor.shape[:1] != (total,):
            raise WeightMismatch(
                f"shape {list(tensor.shape)} found, {total} entries in dimension 0 expected"
            )
        for start, rows, _ in self._places(shard):
            length = rows.stop - rows.start
            fill(
                self.get_parameter(name)[start : start + length], tensor.read(0, rows.start, length)
            )

    def places_of(self, shape: tuple[int, ...], shard: str | None) -> list[Place]:
        """Return the places of this rank's rows of a packed matrix; no place if the matrix has another shape."""
        total = sum(share.total for share in self._shares_of(shard))
        return self._places(shard) if shape == (total, self.in_features) else []

    def _shares_of(self, shard: str | None) -> list[Share]:
        return [share for name, share in self.rows.items() if shard in (None, name)]

    def _places(self, shard: str | None) -> list[Place]:
        places = []
        start = 0  # the row of this layer
        stacked = 0  # the row of the checkpoint's matrix
        for name, share in self.rows.items():
            if shard in (None, name):
                first = stacked + share.start
                rows = slice(first, first + share.length)
                places.append(Place(start, rows, slice(0, self.in_features)))
                stacked += share.total
            start += share.length
        return places


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values as one matrix, whole heads on each rank.

    With fewer KV heads than ranks, each rank holds the one its query heads attend to.
    gated: each head's query is followed by a gate.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        tp: TensorParallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        gated: bool = False,
    ) -> None:
        heads = tp.share(num_heads, "attention heads")
        kv_heads = tp.share_or_copy(num_kv_heads, "KV heads")
        queries = heads.times(2 * head_dim if gated else head_dim)
        rows = {"q": queries, "k": kv_heads.times(head_dim), "v": kv_heads.times(head_dim)}
        super().__init__(hidden_size, rows, bias=bias, dtype=dtype)
        self.head_dim = head_dim
        self.gated = gated
        self.num_heads = heads.length
        self.num_kv_heads = kv_heads.length

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split [tokens, out] into queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim], and gates.

        Gates have the queries' shape, or are None. Heads of each are adjacent; keys and values are views.
        """
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        num_query_heads = 2 * self.num_heads if self.gated else self.num_heads
        query, rest = torch.tensor_split(heads, [num_query_heads], dim=1)
        gate = None
        if self.gated:  # queries and their gates alternate
            gate = query[:, 1::2].contiguous()
            query = query[:, ::2].contiguous()
        return query, rest[:, : self.num_kv_heads], rest[:, self.num_kv_heads :], gate


class RowParallelLinear(ReplicatedLinear):
    """Input features are split over the ranks: the layer takes this rank's part of x and returns the whole y."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        columns = tp.share(in_features, "input features")
        super().__init__(columns.length, out_features, bias=bias, dtype=dtype)
        self.tp = tp
        self.columns = columns

    def forward(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Multiply x [tokens, this rank's in] -> [tokens, out]; only the first rank adds the bias."""
        bias = self.bias if self.tp.rank == 0 else None
        return self.tp.all_reduce(self.product(x, bias, adapters))

    def places_of(self, shape: tuple[int, ...], shard: str | None) -> list[Place]:
        """Return the place of this rank's columns of a packed matrix; no place if the matrix has another shape."""
        if shape != (self.out_features, self.columns.total):
            return []
        columns = slice(self.columns.start, self.columns.start + self.columns.length)
        return [Place(0, slice(0, self.out_features), columns)]

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's columns of `tensor`, or the whole bias, into parameter `name`."""
        fill(
            self.get_parameter(name),
            self.columns.read(tensor, 1) if name == "weight" else tensor.whole(),
        )
