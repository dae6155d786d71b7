"""Linear layers: whole or split over ranks, in oneDNN's packed layout, or in 8 bits."""

import functools
import logging
import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.checkpoint.weights import CheckpointTensor
from engine.cpu_kernels.processor import multiplies_bfloat16, processor_flags
from engine.errors import ConfigError, WeightMismatch
from engine.layers.parallel import Share, TensorParallel
from engine.layers.row_tiles import TiledProduct


class WeightedModule(nn.Module):
    """A module whose own parameters are loaded from the checkpoint.

    shards: the parts each parameter is put together from; (None,) if the checkpoint holds it whole.
    """

    shards: tuple[str | None, ...] = (None,)

    def place_of(self, name: str) -> tuple[str, str | None] | None:
        """Return the parameter and shard that a tensor fills, by its name below this module; None if there is none."""
        return (name, None) if name in dict(self.named_parameters(recurse=False)) else None

    def shards_of(self, name: str) -> tuple[str | None, ...]:
        """Return the shards of parameter `name`."""
        return self.shards

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy the checkpoint's `tensor`, or this rank's share of it, into parameter `name`."""
        fill(self.get_parameter(name), tensor.whole())

    def finish_loading(self) -> None:
        """Change the layout of parameters if need be; called once when all are filled."""


def fill(place: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` into `place`, casting its dtype. Raises WeightMismatch unless the shapes are equal."""
    if place.shape != tensor.shape:
        raise WeightMismatch(f"shape {list(tensor.shape)} found, {list(place.shape)} expected")
    place.copy_(tensor)


TYPICAL_ROWS = 256  # a hint of how many rows the weight will meet; any number is served
PACKED_DTYPES = (torch.float32, torch.bfloat16)

logger = logging.getLogger(__name__)


def pack_weight(weight: nn.Parameter) -> nn.Parameter:
    """Return the weight [out, in] as `linear` is fastest with it: packed by oneDNN, or as it is."""
    if (
        weight.device.type != "cpu"
        or weight.dtype not in PACKED_DTYPES
        or not _can_pack(weight.dtype)
    ):
        return weight
    return nn.Parameter(_pack(weight.data), requires_grad=False)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b with a weight from `pack_weight`. x: [rows, in] -> [rows, out]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return packed


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Return whether this torch has the undocumented ops, and they pay here."""
    if not _is_x86() or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        return False
    ones = torch.ones(8, 8, dtype=dtype)
    try:
        return bool((linear(ones, _pack(ones)) == 8).all())
    except (AttributeError, RuntimeError, TypeError) as error:
        dtype_name = str(dtype).removeprefix("torch.")
        logger.warning(
            "oneDNN's packed linear layers of %s are not used, which is slower: %r",
            dtype_name,
            error,
        )
        return False


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


LARGEST = 127
ZERO = 128  # of activations, which oneDNN multiplies as bytes from 1 to 255
SMALLEST_MAGNITUDE = (
    2.0**-100
)  # so that a row of zeros has a scale too, by which 127 can be divided
FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x: [rows, dim], float32 or bfloat16 -> ([rows, dim] uint8, [rows, 1] float32), row by row.

    x is (bytes - ZERO) * scales, up to half a scale. A row with NaN or infinity has that as its scale.
    """
    x = x.float()
    largest = x.abs().amax(1, keepdim=True).clamp_min(SMALLEST_MAGNITUDE)
    levels = (x * largest.new_tensor(LARGEST).div(largest)).round_()  # 127 / x would round twice
    return levels.add_(ZERO).to(torch.uint8), largest / LARGEST


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight: [out, in] -> ([out, in] int8, [out] float32), each output channel by itself."""
    levels, scales = quantize_rows(weight)
    return (levels.to(torch.int16) - ZERO).to(torch.int8), scales.squeeze(1)


class Int8Product(nn.Module):
    """x W^T + b with W in int8, packed by oneDNN, and x quantized as it comes."""

    def __init__(self, weight: Tensor, quantize: QuantizeRows) -> None:
        """Quantize a weight [out, in], float32 or bfloat16, which is not kept."""
        super().__init__()
        levels, scales = quantize_weight(weight)
        self.packed = nn.Parameter(
            torch.ops.onednn.qlinear_prepack(levels, None), requires_grad=False
        )
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.zeros = torch.zeros(len(scales), dtype=torch.int32)  # of weights, as the op wants them
        self.quantize = quantize

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [rows, in] -> [rows, out], in x's dtype; sums and scales are float32."""
        if len(x) == 0:
            return x.new_empty(0, len(self.scales))
        levels, scales = self.quantize(x)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, ZERO, self.packed, self.scales, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        if bias is not None:
            return product.mul_(scales).add_(bias).to(x.dtype)
        return torch.mul(product, scales, out=torch.empty(product.shape, dtype=x.dtype))


def check_int8() -> None:
    """Raise ConfigError if this machine or this torch does not multiply int8 numbers as above."""
    told = "quantization='int8' cannot be used"
    if not _is_x86() or FLAGS.isdisjoint(processor_flags()):
        raise ConfigError(
            f"{told}: this processor has none of {', '.join(sorted(FLAGS))}, and would round or be slow; leave it out"
        )
    ones = torch.ones(8, 8)
    try:
        product = Int8Product(ones, quantize_rows)(ones, None)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{told}: torch {torch.__version__} has no such product ({error!r})"
        ) from error
    if not torch.allclose(product, torch.tensor(8.0)):
        raise ConfigError(f"{told}: torch {torch.__version__} gives another product than it should")


class ReplicatedLinear(WeightedModule):
    """y = x W^T + b, the whole weight on every rank. weight: [out, in].

    instead: multiplies in place of the weight: Int8Product, or TiledProduct in a deterministic engine.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
            if bias
            else None
        )
        self.instead: Int8Product | TiledProduct | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in] -> [tokens, out]."""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b of this rank. x: [tokens, in] -> [tokens, out]."""
        return linear(x, self.weight, bias) if self.instead is None else self.instead(x, bias)

    def quantize(self, quantize_rows: QuantizeRows) -> None:
        """Replace the weight by one in int8; once, when it is loaded and before it is packed."""
        self.instead = Int8Product(self.weight, quantize_rows)
        del self.weight

    def finish_loading(self) -> None:
        """Pack the weight where that pays."""
        if self.instead is None:
            self.weight = pack_weight(self.weight)


class ColumnParallelLinear(ReplicatedLinear):
    """Output features split over the ranks: x whole -> this rank's part of y.

    rows: by shard name, this rank's share of each of the matrices that are stacked here and take the same input.
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
        total = sum(share.total for share in self.rows.values())
        if shard is None and tensor.shape[:1] != (total,):
            raise WeightMismatch(
                f"shape {list(tensor.shape)} found, {total} entries in dimension 0 expected"
            )
        start = stacked = 0
        for other, share in self.rows.items():
            place = self.get_parameter(name)[start : start + share.length]
            if shard is None:
                fill(place, tensor.read(0, stacked + share.start, share.length))
            elif other == shard:
                fill(place, share.read(tensor, 0))
            start += share.length
            stacked += share.total


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values as one matrix, whole heads on each rank.

    With fewer KV heads than ranks, each rank holds the one its query heads attend to.
    gated: behind each head's query is a gate.
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
        self.head_dim, self.gated = head_dim, gated
        self.num_heads, self.num_kv_heads = heads.length, kv_heads.length

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split [tokens, out] into queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim], and gates.

        Gates have the queries' shape, or are None. Heads of each are adjacent; keys and values are views.
        """
        heads, gate = qkv.view(qkv.shape[0], -1, self.head_dim), None
        query, rest = torch.tensor_split(heads, [self.num_heads * (2 if self.gated else 1)], dim=1)
        if self.gated:
            query, gate = query[:, ::2].contiguous(), query[:, 1::2].contiguous()
        return query, rest[:, : self.num_kv_heads], rest[:, self.num_kv_heads :], gate


class RowParallelLinear(ReplicatedLinear):
    """Input features split over the ranks: this rank's part of x -> y whole, summed over the ranks."""

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

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, this rank's in] -> [tokens, out]; only the first rank adds the bias."""
        return self.tp.all_reduce(self.product(x, self.bias if self.tp.rank == 0 else None))

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy this rank's columns of `tensor`, or the whole bias, into parameter `name`."""
        fill(
            self.get_parameter(name),
            self.columns.read(tensor, 1) if name == "weight" else tensor.whole(),
        )
