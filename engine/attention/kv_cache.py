"""The KV pool's tensors: one pool for all layers, cut into blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


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
    """K and V of all layers: [layers, 2, blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.pool = _zeros(shape, dtype, device)
        self.layers = [LayerKVCache(layer[0], layer[1]) for layer in self.pool]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, so that nothing stale can turn a masked score into NaN.

    On a CPU they come from numpy, whose large zeros take memory only as they are written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def block_bytes(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block: K and V of all layers."""
    return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
