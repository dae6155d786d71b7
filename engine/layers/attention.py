"""Attention over the paged KV cache, by whichever backend the runner chose."""

from torch import Tensor, nn

from engine.attention.base import ForwardBatch, KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.errors import AttentionRefused


class Attention(nn.Module):
    """Attends to what is stored, the step's own keys and values among it."""

    def __init__(self, backend: KernelBackend, features: AttentionFeatures) -> None:
        """Raises AttentionRefused if the backend cannot compute such an attention."""
        super().__init__()
        if problem := backend.refusal(features):
            raise AttentionRefused(f"attention_backend={backend.name!r} {problem}")
        self.backend = backend
        self.features = features

    def store(self, key: Tensor, value: Tensor, batch: ForwardBatch, cache: LayerKVCache) -> None:
        """key, value: [tokens, kv_heads, dim], of the batch's tokens."""
        self.backend.store(key, value, cache, batch.slot_mapping)

    def attend(
        self, query: Tensor, batch: ForwardBatch, cache: LayerKVCache, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to what is stored. query: [tokens, heads, dim] -> [tokens, heads * dim].

        sinks: [heads] float32, see KernelBackend.forward.
        """
        return self.backend.forward(query, cache, batch.attention, self.features, sinks).flatten(1)
