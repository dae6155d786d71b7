"""Attention over the paged KV cache, by whichever backend the runner chose."""

from __future__ import annotations

from torch import Tensor, nn

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch
from engine.kv_cache import LayerKVCache


class Attention(nn.Module):
    """Stores the step's keys and values, then attends: in that order, so that a step shares its prefixes."""

    def __init__(self, backend: AttentionBackend, *, scale: float) -> None:
        super().__init__()
        self.backend = backend
        self.scale = scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch, cache: LayerKVCache
    ) -> Tensor:
        """query: [tokens, heads, dim]; key, value: [tokens, kv_heads, dim] -> [tokens, heads * dim]."""
        cache.write(key, value, batch.slot_mapping)
        return self.backend.forward(query, cache, batch.attention, scale=self.scale).flatten(1)
