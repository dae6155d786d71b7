"""The seam between the model and an attention implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_cache import LayerKVCache
from engine.layers.kernels import LayerKernels


class AttentionMetadata:
    """What one backend needs to know about a step's sequences; each backend has its own subclass."""


class AttentionBackend(ABC):
    """Attention over block tables. One object serves all layers and keeps no state between steps.

    max_head_dim: the largest head it serves, None if any.
    layer_kernels: fused kernels for the other layers, None if those stay in plain torch.
    """

    max_head_dim: int | None = None
    layer_kernels: LayerKernels | None = None

    @abstractmethod
    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError if this backend cannot run on the device."""

    @abstractmethod
    def build_metadata(
        self,
        block_tables: NDArray[np.int32],
        context_lens: NDArray[np.int64],
        query_lens: NDArray[np.int64],
    ) -> AttentionMetadata:
        """Prepare one step, once for all layers.

        block_tables: [seqs, max_blocks], valid up to each context.  context_lens: [seqs], tokens each
        sequence has once this step is computed.  query_lens: [seqs], how many of them are in this step.
        """

    def store(self, keys: Tensor, values: Tensor, cache: LayerKVCache, slot_mapping: Tensor) -> None:
        """Write the step's keys and values to their slots: see LayerKVCache.write."""
        cache.write(keys, values, slot_mapping)

    @abstractmethod
    def forward(
        self, query: Tensor, cache: LayerKVCache, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """Causal attention of each query over its sequence's cached keys and values.

        query: [tokens, heads, head_dim], the step's sequences one after another; their own keys and values
        are in the cache already.  Returns [tokens, heads, head_dim].
        """
