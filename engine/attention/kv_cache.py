"""The KV pool's tensors: one pool for all layers, cut into blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.features import AttentionFeatures


@dataclass(frozen=True)
class LayerKVCache:
    """One layer's keys and values, each [blocks, block_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor

    def write(self, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Store the new tokens' keys and values.

        keys, values: [tokens, kv_heads, head_dim].
        slot_mapping: [tokens] int64, block_id * block_size + offset, each at most once.
        """
        self.keys.flatten(0, 1)[slot_mapping] = keys
        self.values.flatten(0, 1)[slot_mapping] = values


class KVCache:
    """K and V of all layers, one after another: [2, blocks, block_size, kv_heads, head_dim] of each layer."""

    def __init__(
        self,
        layers: Sequence[AttentionFeatures],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = [(2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
        self.pool = _zeros(sum(map(math.prod, shapes)), dtype, device)
        parts = torch.split(self.pool, [math.prod(shape) for shape in shapes])
        both = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.layers = [LayerKVCache(pair[0], pair[1]) for pair in both]


def _zeros(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, so that nothing stale can turn a masked score into NaN.

    On a CPU they come from numpy, whose large zeros take memory only as they are written.
    """
    if device.type != "cpu":
        return torch.zeros(length, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(length * dtype.itemsize, np.uint8)).view(dtype)


def block_bytes(layers: Sequence[AttentionFeatures], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of all layers."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize
