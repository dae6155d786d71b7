"""Attention over the paged KV cache, by whichever backend the runner chose."""

from __future__ import annotations

from torch import Tensor, nn

from engine.attention.base import KernelBackend
from engine.attention.forward_batch import ForwardBatch
from engine.attention.kv_cache import LayerKVCache
from engine.errors import ConfigError


class Attention(nn.Module):
    """Stores the step's keys and values, then attends: in that order, so that a step shares its prefixes."""

    def __init__(self, backend: KernelBackend, head_dim: int) -> None:
        """Raises ConfigError if the backend cannot take heads of that size."""
        super().__init__()
        if backend.max_head_dim is not None and head_dim > backend.max_head_dim:
            raise ConfigError(
                f"attention_backend={backend.name!r} takes heads of up to {backend.max_head_dim} numbers, "
                f"this model has {head_dim}; use attention_backend='torch'"
            )
        self.backend = backend
        self.scale = head_dim**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch, cache: LayerKVCache
    ) -> Tensor:
        """query: [tokens, heads, dim]; key, value: [tokens, kv_heads, dim] -> [tokens, heads * dim]."""
        self.backend.store(key, value, cache, batch.slot_mapping)
        return self.backend.forward(query, cache, batch.attention, scale=self.scale).flatten(1)
