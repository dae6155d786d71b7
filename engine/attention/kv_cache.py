"""The KV pool's tensors: one pool for all layers, cut into blocks."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.features import AttentionFeatures
from engine.attention.state_pool import StatePool, StateShape, state_bytes, zeros
from engine.errors import ConfigError

FP8 = torch.float8_e4m3fn
FP8_LIMIT = 448.0  # the largest number it holds
HEADROOM = 8.0
Scales = tuple[Tensor, Tensor]


class LayerKVCache(NamedTuple):
    """One layer's keys and values, each [blocks, block_size, kv_heads, head_dim].

    scales: factors of the FP8 numbers of each head's keys and values, [kv_heads] float32 each; None for other
    dtypes. Measured ones are powers of two, which change no mantissa.
    """

    keys: Tensor
    values: Tensor
    scales: Scales | None = None

    def write(self, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Store new keys and values, [tokens, kv_heads, head_dim] each.

        slot_mapping: [tokens] int64, slots, which are block_id * block_size + offset; each at most once.
        """
        if self.scales is not None:
            keys, values = (
                quantize(x, scale) for x, scale in zip((keys, values), self.scales, strict=True)
            )
        self.keys.flatten(0, 1)[slot_mapping] = keys
        self.values.flatten(0, 1)[slot_mapping] = values


class KVCache:
    """Keys and values of all layers: [2, blocks, block_size, kv_heads, head_dim] of each layer.

    states: a pool beside them; None if the model keeps no states.
    index: a pool with a row for each slot; None if the model has no index keys.
    """

    def __init__(
        self,
        layers: Sequence[AttentionFeatures],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        shapes = [
            (2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim) for layer in layers
        ]
        self.pool = zeros(sum(map(math.prod, shapes)), dtype, device)
        parts = torch.split(self.pool, [math.prod(shape) for shape in shapes])
        both = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.layers = [
            LayerKVCache(pair[0], pair[1], scales[i] if scales else None)
            for i, pair in enumerate(both)
        ]
        self._groups = _views_to_copy(self.pool, shapes)
        self.block_size = block_size
        self.states: StatePool | None = None
        self.index: StatePool | None = None

    def states_of(self, layer: int) -> list[Tensor]:
        """Return the states of a layer of the model, [rows, *shape] each."""
        assert self.states is not None, "a model with states has a pool of them"
        return [tensor for _, tensor in self.states.layers[layer]]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys, values, index keys and states."""
        return self.pool.nbytes + sum(
            pool.num_bytes for pool in (self.states, self.index) if pool is not None
        )

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to others in all layers. sources, targets: [slots] int64; no slot is in both."""
        for group in self._groups:
            group.index_copy_(1, targets, group.index_select(1, sources))
        if self.index is not None:
            self.index.write(targets, self.index.read(sources))


def _views_to_copy(pool: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of the pool, in which slots can be copied: [2 * layers, slots, numbers].

    Adjacent layers of one shape share a view. Its numbers are int64 or uint8, whatever the pool's dtype is.
    """
    views = []
    start = 0
    for shape, layers in groupby(shapes):
        num_sides = 2 * len(list(layers))
        length = num_sides * math.prod(shape[1:])
        slot_bytes = math.prod(shape[3:]) * pool.itemsize
        is_wide = slot_bytes % 8 == 0 and start * pool.itemsize % 8 == 0
        part = pool[start : start + length].view(torch.int64 if is_wide else torch.uint8)
        views.append(part.view(num_sides, shape[1] * shape[2], -1))
        start += length
    return views


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Turn x, [tokens, kv_heads, head_dim], into FP8 numbers of these scales; cut what is too large.

    NaN stays, so that a fault is not hidden.
    """
    return (x.float() / scales[:, None]).clamp(-FP8_LIMIT, FP8_LIMIT).to(FP8)


def largest_magnitudes(pool: Tensor) -> Tensor:
    """Return each head's largest magnitude, [kv_heads] float32. Raises ConfigError if one is not finite.

    pool: a layer's keys or values, not in FP8.
    """
    largest = pool.float().abs().amax((0, 1, 3))
    if not largest.isfinite().all():
        raise ConfigError(
            "kv_cache_dtype='fp8_e4m3' cannot be used: keys or values of this model are not finite; "
            "leave it out, or set dtype='bfloat16'"
        )
    return largest


def choose_scales(largest: Tensor) -> Tensor:
    """Choose scales, [kv_heads], that leave room for numbers HEADROOM times as large as each head's largest one.

    largest: [kv_heads], as largest_magnitudes returns it.
    """
    exponents = torch.ceil(torch.log2(largest * (HEADROOM / FP8_LIMIT)))
    return torch.where(largest > 0, torch.exp2(exponents), 1.0)


def block_bytes(
    layers: Sequence[AttentionFeatures],
    block_size: int,
    dtype: torch.dtype,
    index_keys: Sequence[StateShape] = (),
) -> int:
    """Return the bytes of one block: keys and values of all layers in this dtype, index keys in their own."""
    token_bytes = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize
    return block_size * (token_bytes + state_bytes(index_keys))
