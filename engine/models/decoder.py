"""The Llama-like decoder: attention and gated MLP blocks, in the variants its configuration names."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.attention.adapter_rows import AdapterRows
from engine.attention.base import ForwardBatch, KernelBackend
from engine.attention.kv_cache import KVCache, LayerKVCache
from engine.checkpoint.weights import CheckpointTensor
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.layers.moe import SparseMLP
from engine.layers.parallel import Share, TensorParallel
from engine.layers.rotary import RotaryEmbedding, apply_rotary
from engine.layers.row_tiles import each_row
from engine.layers.stream import GatedActivation, NormPair, ParallelRMSNorm, RMSNorm, Stream
from engine.layers.weighted_module import WeightedModule, fill
from engine.models.base import CausalModel
from engine.models.decoder_config import DecoderConfig, LayerConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, as RotaryEmbedding returns them


@dataclass(frozen=True)
class DecoderParts:
    """The configuration and builders that all modules of one decoder share."""

    config: DecoderConfig
    tp: TensorParallel
    backend: KernelBackend
    dtype: torch.dtype

    def norm(self, features: int | Share) -> RMSNorm:
        """Build a norm over a number of features, or over features that are split over the ranks."""
        flags = self.config.flags
        eps = self.config.rms_norm_eps
        kernels = self.backend.layer_kernels
        dtype = torch.float32 if flags.float32_norms else self.dtype
        if isinstance(features, Share):
            return ParallelRMSNorm(features, eps, self.tp, dtype=dtype, kernels=kernels)
        return RMSNorm(features, eps, dtype=dtype, kernels=kernels, offset=flags.norm_offset)


class DecoderAttention(WeightedModule):
    """Self-attention. sinks: [this rank's heads] float32; None in a model without attention sinks."""

    def __init__(self, parts: DecoderParts, layer: LayerConfig) -> None:
        super().__init__()
        config = parts.config
        sizes = parts.config.sizes
        tp = parts.tp
        dtype = parts.dtype
        self.rope = layer.rope
        self.qkv_proj = QKVParallelLinear(
            sizes.hidden_size,
            sizes.head_dim,
            sizes.num_heads,
            sizes.num_kv_heads,
            tp,
            bias=config.qkv_bias,
            dtype=dtype,
            gated=config.flags.gated_attention,
        )
        self.o_proj = RowParallelLinear(
            sizes.num_heads * sizes.head_dim,
            sizes.hidden_size,
            tp,
            bias=config.output_bias,
            dtype=dtype,
        )
        if config.flags.qk_norm == "head":
            self.q_norm = parts.norm(sizes.head_dim)
            self.k_norm = parts.norm(sizes.head_dim)
        elif config.flags.qk_norm == "whole":
            self.q_norm = parts.norm(self.qkv_proj.rows["q"])
            self.k_norm = parts.norm(self.qkv_proj.rows["k"])
        self.qk_norm = config.flags.qk_norm
        self.heads = tp.share(sizes.num_heads, "attention heads")
        sinks = torch.empty(self.heads.length, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks, requires_grad=False) if config.flags.sinks else None
        self.rms_norm_eps = config.rms_norm_eps
        self.kernels = parts.backend.layer_kernels
        self.backend = parts.backend
        self.features = config.attention(layer, tp)
        self.backend.check_features(self.features)

    def forward(
        self,
        stream: Stream,
        norms: NormPair,
        rotations: Sequence[Rotation],
        batch: ForwardBatch,
        cache: LayerKVCache,
        rows: Tensor | None = None,
    ) -> Stream:
        """Return the residual stream after attention, of `rows` alone if given."""
        normed, total = stream.normed(norms.before)
        query, key, value, gate = self.qkv_proj.split(self.qkv_proj(normed, batch.adapters))
        if self.qk_norm == "whole":
            query = self.q_norm(query.flatten(1)).view(query.shape)
            key = self.k_norm(key.flatten(1)).view(key.shape)
        query = self._norm_rotate_and_store(query, key, value, rotations[self.rope], batch, cache)
        attended = self.backend.forward(
            query, cache, batch.attention, self.features, self.sinks
        ).flatten(1)
        if rows is not None:
            attended = attended[rows]
            total = total[rows]
        if gate is not None:
            gate = gate.flatten(1) if rows is None else gate.flatten(1)[rows]
            fused = None if self.kernels is None else self.kernels.sigmoid_and_mul
            attended = attended * gate.sigmoid() if fused is None else fused(attended, gate)
        return norms.joined(total, self.o_proj(attended, batch.adapters))

    def load(self, name: str, tensor: CheckpointTensor, shard: str | None) -> None:
        """Copy the sinks of this rank's heads."""
        fill(self.get_parameter(name), self.heads.read(tensor, 0))

    def _norm_rotate_and_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        cache: LayerKVCache,
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values in the cache, and return the queries."""
        each_head = self.qk_norm == "head"
        if self.kernels is not None:
            norms = (self.q_norm.weight, self.k_norm.weight) if each_head else None
            return self.kernels.norm_rotate_and_store(
                query, key, value, rotation, norms, self.rms_norm_eps, cache, batch.slot_mapping
            )
        if each_head:
            query = self.q_norm(query)
            key = self.k_norm(key)
        self.backend.store(apply_rotary(key, *rotation), value, cache, batch.slot_mapping)
        return apply_rotary(query, *rotation)


class DecoderMLP(nn.Module):
    """Gated MLP: down(activation(gate(x)) * up(x)).

    intermediate_size: how many features gate and up have; None stands for the configuration's number.
    """

    def __init__(self, parts: DecoderParts, intermediate_size: int | None = None) -> None:
        super().__init__()
        config = parts.config
        sizes = parts.config.sizes
        tp = parts.tp
        dtype = parts.dtype
        bias = config.mlp_bias
        size = intermediate_size or sizes.intermediate_size
        share = tp.share(size, "features of gate and up")
        rows = {"gate": share, "up": share}
        self.gate_up_proj = ColumnParallelLinear(sizes.hidden_size, rows, bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(size, sizes.hidden_size, tp, bias=bias, dtype=dtype)
        self.activation = GatedActivation(config.activation, parts.backend.layer_kernels)

    def forward(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Compute hidden [tokens, hidden] -> [tokens, hidden]."""
        activated = self.activation(self.gate_up_proj(hidden, adapters))
        output: Tensor = self.down_proj(activated, adapters)
        return output


class DecoderLayer(WeightedModule):
    """One block: attention and MLP.

    The MLP's output is not yet added to the residual stream: both are passed on, and the next norm adds them.
    """

    def __init__(self, parts: DecoderParts, layer: LayerConfig) -> None:
        super().__init__()
        size = parts.config.sizes.hidden_size
        kernels = parts.backend.layer_kernels
        self.self_attn: DecoderAttention | GatedDeltaNet
        if layer.delta is None:
            self.self_attn = DecoderAttention(parts, layer)
        else:
            self.self_attn = GatedDeltaNet(
                layer.delta, size, parts.tp, dtype=parts.dtype, kernels=kernels
            )
        self.mlp: DecoderMLP | SparseMLP
        if layer.experts is None:
            self.mlp = DecoderMLP(parts)
        else:
            shared = layer.experts.shared_size
            self.mlp = SparseMLP(
                layer.experts,
                size,
                parts.tp,
                dtype=parts.dtype,
                kernels=kernels,
                shared_expert=DecoderMLP(parts, shared) if shared else None,
            )
        by_name = {name: parts.norm(size) for name in parts.config.flags.norms if name}
        for name, norm in by_name.items():
            self.add_module(name, norm)
        norms = [by_name[name] if name else None for name in parts.config.flags.norms]
        self.attention_norms = NormPair(*norms[:2])
        self.mlp_norms = NormPair(*norms[2:])

    def forward(
        self,
        stream: Stream,
        rotations: Sequence[Rotation],
        batch: ForwardBatch,
        cache: LayerKVCache | Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> Stream:
        """Return the residual stream after the block, of `rows` alone if given."""
        if isinstance(self.self_attn, DecoderAttention):
            stream = self.self_attn(stream, self.attention_norms, rotations, batch, cache, rows)
        else:
            stream = self.self_attn(stream, self.attention_norms, batch.states, cache, rows)
        normed, total = stream.normed(self.mlp_norms.before)
        return self.mlp_norms.joined(total, self.mlp(normed, batch.adapters))


class DecoderModel(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, parts: DecoderParts) -> None:
        super().__init__()
        config = parts.config
        sizes = parts.config.sizes
        self.embed_tokens = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, parts.tp, dtype=parts.dtype
        )
        # The scale is rounded to the embeddings' dtype. In bfloat16 that changes it by up to 0.4 %.
        scale = torch.tensor(sizes.hidden_size**0.5, dtype=parts.dtype, device="cpu").item()
        self.embedding_scale = scale if config.flags.scaled_embeddings else None
        self.layers = nn.ModuleList(DecoderLayer(parts, layer) for layer in config.layers)
        self.norm = parts.norm(sizes.hidden_size)
        self.with_states = [i for i, layer in enumerate(config.layers) if layer.delta is not None]

    def forward(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        rotations: Sequence[Rotation],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states, [tokens, hidden]; with `rows`, those of these rows alone."""
        hidden = self.embed_tokens(batch.token_ids)
        if self.embedding_scale is not None:
            hidden *= self.embedding_scale
        stream = Stream(hidden)
        last = len(self.layers) - 1
        caches = iter(cache.layers)
        for i, layer in enumerate(self.layers):
            # Earlier blocks compute all rows, for the attention of the blocks after them.
            wanted = rows if i == last else None
            layer_cache = next(caches) if i not in self.with_states else cache.states_of(i)
            stream = layer(stream, rotations, batch, layer_cache, wanted)
        normed, _ = stream.normed(self.norm)
        return normed


class DecoderForCausalLM(CausalModel):
    """The decoder with its LM head.

    Modules have their names in the checkpoint, except those that hold several of its modules, such as qkv_proj.
    """

    is_deterministic = False

    def __init__(self, parts: DecoderParts, rotaries: Sequence[RotaryEmbedding]) -> None:
        """rotaries: one for each of the configuration's ropes, in their order."""
        super().__init__()
        config = parts.config
        sizes = parts.config.sizes
        self.rotaries = nn.ModuleList(rotaries)
        self.model = DecoderModel(parts)
        self.lm_head = ParallelLMHead(
            sizes.vocab_size, sizes.hidden_size, parts.tp, dtype=parts.dtype
        )
        self.tied = config.tie_word_embeddings
        self.logit_soft_cap = config.logit_soft_cap
        self.attention_layers, self.states, self.index_keys = config.kept(parts.tp, parts.dtype)
        self.layer_numbers = [i for i, layer in enumerate(config.layers) if layer.delta is None]
        self.hidden_size = sizes.hidden_size
        self.vocab_size = sizes.vocab_size
        kernels = parts.backend.layer_kernels
        self._has_delta_kernel = kernels is not None and kernels.delta_net is not None

    @property
    def can_record_states(self) -> bool:
        """Whether a kernel reads and writes the states by StateParts.table alone."""
        return self._has_delta_kernel

    def tie_weights(self) -> None:
        """Make the LM head share the embedding's weight, if the checkpoint ties them."""
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def states_of(self, rows: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the hidden states of `rows`. The last block computes only these rows after its attention.

        With adapters the last block computes all rows: their order by adapter holds for the batch as a whole.
        """
        if batch.adapters is not None:
            return super().states_of(rows, batch, cache)
        hidden: Tensor = self.model(batch, cache, self._rotations(batch), rows)
        return hidden

    def hidden_states(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the hidden states of all rows. A step that a graph records computes all of them."""
        hidden: Tensor = self.model(batch, cache, self._rotations(batch))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiply by the LM head, split over the ranks by vocabulary."""
        logits: Tensor = self.lm_head(hidden)
        cap = self.logit_soft_cap
        if cap is None:
            return logits

        def capped(logits: Tensor) -> Tensor:
            return logits.float().div_(cap).tanh_().mul_(cap).to(logits.dtype)

        return each_row(capped, logits) if self.is_deterministic else capped(logits)

    def _rotations(self, batch: ForwardBatch) -> list[Rotation]:
        """Return the cosines and sines at the batch's positions, for each rotation."""
        return [rotary(batch.positions) for rotary in self.rotaries]
