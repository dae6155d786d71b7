"""The residual stream, and the products between which it travels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.kv_cache import LayerKVCache
from engine.attention.layer_kernels import ProductKernels
from engine.layers.activation import GeluAndMul, SiluAndMul
from engine.layers.linear import QKVParallelLinear, ReplicatedLinear
from engine.layers.norm import RMSNorm


@dataclass(frozen=True)
class Stream:
    """The residual stream of a step's tokens: `total` plus, where there is one, the output `pending`.

    Both are [tokens, hidden]. What is pending is added in the pass over memory that the next norm takes.
    squares: of `total`, as ProductKernels have them, where its last addend came with them; None else.
    """

    total: Tensor
    pending: Tensor | None = None
    squares: Tensor | None = None

    def normed(self, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Return (the stream, normalised if there is a norm; the stream)."""
        if norm is None:
            total = self.total if self.pending is None else self.pending + self.total
            return total, total
        if self.pending is None:
            return norm(self.total), self.total
        return norm.add_and_norm(self.pending, self.total)


class StreamProducts:
    """A layer's products from and to the stream: with norm, gate and sum in the same launch where `kernels`
    serve a step, else one after another."""

    def __init__(self, kernels: ProductKernels | None) -> None:
        self._kernels = kernels

    def prepare(self, norm: RMSNorm | None, after: ReplicatedLinear, before: ReplicatedLinear) -> None:
        """Have the weights as the kernels want them; once, when they are loaded and before they are packed.

        The norm's weight moves into that of the product after it. before: the product that is added.
        """
        if self._kernels is None or norm is None:
            return
        after.weight.mul_(norm.weight)
        norm.weight.fill_(1.0)
        after.may_pack = before.may_pack = False

    def after_norm(
        self, stream: Stream, norm: RMSNorm | None, linear: ReplicatedLinear
    ) -> tuple[Tensor, Tensor]:
        """Return (the product of the normalised stream, the stream)."""
        kernels = self._kernels_for(stream.total, linear)
        if kernels is None or norm is None or stream.squares is None:
            normed, total = stream.normed(norm)
            return linear(normed), total
        product = kernels.norm_linear(stream.total, stream.squares, norm.eps, linear.weight, linear.bias)
        return product, stream.total

    def heads_after_norm(
        self,
        stream: Stream,
        norm: RMSNorm | None,
        linear: QKVParallelLinear,
        rotation: tuple[Tensor, Tensor],
        head_norms: tuple[Tensor, Tensor] | None,
        cache: LayerKVCache,
        slot_mapping: Tensor,
    ) -> Tensor | None:
        """The queries of the normalised stream, rotated, keys and values being stored; None where another
        way is taken. The stream stays as it is. head_norms: weights, as NormRotateAndStore takes them."""
        kernels = self._kernels_for(stream.total, linear)
        if kernels is None or norm is None or stream.squares is None:
            return None
        # a cache in another dtype than the model's has scales besides
        in_dtype = cache.keys.dtype == stream.total.dtype
        if not in_dtype or not kernels.serves_heads(
            len(stream.total), linear.head_dim, rotation[0].shape[-1]
        ):
            return None
        return kernels.project_heads(
            stream.total, stream.squares, norm.eps, linear.weight, linear.bias, rotation, head_norms,
            cache.keys, cache.values, slot_mapping,
        )  # fmt: skip

    def gate_after_norm(
        self,
        stream: Stream,
        norm: RMSNorm | None,
        linear: ReplicatedLinear,
        activation: SiluAndMul | GeluAndMul,
    ) -> tuple[Tensor, Tensor]:
        """The same of a merged gate and up projection, with the activation of it."""
        kernels = self._kernels_for(stream.total, linear)
        if kernels is None or norm is None or stream.squares is None:
            normed, total = stream.normed(norm)
            return activation(linear(normed)), total
        gelu = isinstance(activation, GeluAndMul)
        gated = kernels.norm_gate(
            stream.total, stream.squares, norm.eps, linear.weight, linear.bias, gelu=gelu
        )
        return gated, stream.total

    def add(self, x: Tensor, linear: ReplicatedLinear, norm: RMSNorm | None, total: Tensor) -> Stream:
        """The stream `total` with the product of x, which the norm normalises if there is one."""
        kernels = self._kernels_for(x, linear)
        if kernels is None or norm is not None:
            product = linear(x)
            return Stream(total, product if norm is None else norm(product))
        total, squares = kernels.linear_add(x, linear.weight, linear.bias, total)
        return Stream(total, squares=squares)

    def _kernels_for(self, x: Tensor, linear: ReplicatedLinear) -> ProductKernels | None:
        if self._kernels is None or not self._kernels.serves(len(x), linear.weight):
            return None
        return self._kernels
