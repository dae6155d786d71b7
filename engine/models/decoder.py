"""The Llama-like decoder: attention and gated MLP blocks, in the variants its configuration names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.attention.base import KernelBackend
from engine.attention.features import AttentionFeatures
from engine.attention.forward_batch import ForwardBatch
from engine.attention.kv_cache import KVCache, LayerKVCache
from engine.layers.activation import SiluAndMul
from engine.layers.attention import Attention
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.parallel import TensorParallel
from engine.layers.rotary import RotaryEmbedding, apply_rotary
from engine.models.base import CausalModel
from engine.models.decoder_config import DecoderConfig, LayerConfig


@dataclass(frozen=True)
class DecoderParts:
    """All that the modules of one decoder are built from."""

    config: DecoderConfig
    tp: TensorParallel
    backend: KernelBackend
    dtype: torch.dtype


def hidden_norm(parts: DecoderParts) -> RMSNorm:
    """A norm of the residual stream."""
    config = parts.config
    return RMSNorm(
        config.hidden_size, config.rms_norm_eps, dtype=parts.dtype, kernels=parts.backend.layer_kernels
    )


class DecoderAttention(nn.Module):
    """Self-attention with grouped KV heads, rotary positions and, by flag, per-head norms."""

    def __init__(self, parts: DecoderParts, layer: LayerConfig) -> None:
        super().__init__()
        config, tp, dtype = parts.config, parts.tp, parts.dtype
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            tp,
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            tp,
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.q_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype) if config.flags.qk_norm else None
        )
        self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype) if config.flags.qk_norm else None
        )
        self.rms_norm_eps = config.rms_norm_eps
        self.kernels = parts.backend.layer_kernels
        self.attention = Attention(
            parts.backend,
            AttentionFeatures(
                self.qkv_proj.num_heads,
                self.qkv_proj.num_kv_heads,
                config.head_dim,
                scale=config.head_dim**-0.5,
                window=layer.window,
            ),
        )

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerKVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """hidden: [tokens, hidden] -> [tokens, hidden], or of those `rows` alone."""
        query, key, value = self.qkv_proj.split(self.qkv_proj(hidden))
        query, key = self._norm_and_rotate(query, key, rotation)
        attended = self.attention(query, key, value, batch, cache)
        output: Tensor = self.o_proj(attended if rows is None else attended[rows])
        return output

    def _norm_and_rotate(
        self, query: Tensor, key: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        if self.kernels is not None:
            weights = None if norms is None else (norms[0].weight, norms[1].weight)
            return self.kernels.norm_and_rotate(query, key, rotation, weights, self.rms_norm_eps)
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        return apply_rotary(query, *rotation), apply_rotary(key, *rotation)


class DecoderMLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__()
        config, tp, dtype = parts.config, parts.tp, parts.dtype
        sizes = {"gate": config.intermediate_size, "up": config.intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, sizes, tp, bias=False, dtype=dtype)
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, tp, bias=False, dtype=dtype
        )
        self.activation = SiluAndMul(parts.backend.layer_kernels)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, hidden] -> [tokens, hidden]."""
        output: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return output


class DecoderLayer(nn.Module):
    """One block; the residual stream travels beside the hidden states so that each norm adds it."""

    def __init__(self, parts: DecoderParts, layer: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm = hidden_norm(parts)
        self.self_attn = DecoderAttention(parts, layer)
        self.post_attention_layernorm = hidden_norm(parts)
        self.mlp = DecoderMLP(parts)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerKVCache,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (MLP output, the residual stream before it is added), of `rows` alone if given."""
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.self_attn(hidden, rotation, batch, cache, rows)
        if rows is not None:
            residual = residual[rows]
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return self.mlp(hidden), residual


class DecoderModel(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__()
        config = parts.config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, parts.tp, dtype=parts.dtype
        )
        self.layers = nn.ModuleList(DecoderLayer(parts, layer) for layer in config.layers)
        self.norm = hidden_norm(parts)

    def forward(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        rotation: tuple[Tensor, Tensor],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [tokens, hidden], or of those `rows` alone.

        Of the last block's tokens the others need no more than their keys and values.
        """
        hidden = self.embed_tokens(batch.token_ids)
        residual = torch.zeros_like(hidden)
        last = len(self.layers) - 1
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache.layers, strict=True)):
            wanted = rows if i == last else None
            hidden, residual = layer(hidden, residual, rotation, batch, layer_cache, wanted)
        normed, _ = self.norm.add_and_norm(hidden, residual)
        return normed


class DecoderForCausalLM(CausalModel):
    """The decoder with its LM head. Module names are the checkpoint's, save for the packed ones.

    packed: last module name in the checkpoint -> (module that holds it here, shard in that module).
    """

    packed: ClassVar[dict[str, tuple[str, str]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, parts: DecoderParts, rotary: RotaryEmbedding) -> None:
        super().__init__()
        config = parts.config
        self.rotary = rotary
        self.model = DecoderModel(parts)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, parts.tp, dtype=parts.dtype)
        self.tied = config.tie_word_embeddings
        self.attention_layers = [m.features for m in self.modules() if isinstance(m, Attention)]
        self.hidden_size = config.hidden_size

    def tie_weights(self) -> None:
        """Make the LM head share the embedding's weight, if the checkpoint ties them."""
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The same, with no more of the last block than the rows that sample need."""
        return self.logits(self.model(batch, cache, self.rotary(batch.positions), batch.sample_rows))

    def hidden_states(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The same for all rows, as a recorded step needs them."""
        hidden: Tensor = self.model(batch, cache, self.rotary(batch.positions))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiply by the LM head, split over the ranks by vocabulary."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()
