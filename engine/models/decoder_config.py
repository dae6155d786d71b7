"""DecoderConfig: the native decoder's reading of a checkpoint's configuration, and its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from reprlib import repr as brief  # short
from typing import Any

import torch

from engine.attention.features import AttentionFeatures
from engine.checkpoint.model_config import (
    MAX_SIZE,
    ModelConfig,
    number,
    optional_number,
    written_length,
)
from engine.errors import ConfigError, UnsupportedModel
from engine.layers.gated_delta_net import DeltaHeads
from engine.layers.moe import Experts
from engine.layers.parallel import TensorParallel
from engine.layers.rotary import Rope
from engine.layers.stream import ACTIVATIONS
from engine.models.base import Kept
from engine.models.registry import DecoderFlags


def size(values: Mapping[str, Any], name: str) -> int:
    """Return a size. Raises ConfigError for an impossible one, KeyError if it is absent."""
    value = values[name]
    if type(value) is not int or not 0 < value < MAX_SIZE:
        raise ConfigError(
            f"config.json: {name} must be between 1 and {MAX_SIZE - 1}, got {brief(value)}"
        )
    return value


def truth(values: Mapping[str, Any], name: str) -> bool:
    """Return a boolean; null and a missing key count as False. Raises ConfigError for another value."""
    value = values.get(name) or False
    if type(value) is not bool:
        raise ConfigError(f"config.json: {name} must be true or false, got {brief(value)}")
    return value


def read_experts(
    known: Mapping[str, Any], flags: DecoderFlags, num_layers: int, intermediate_size: int
) -> list[Experts | None]:
    """Return each layer's experts; None stands for a layer with an MLP.

    known: the values of config.json under the keys that this architecture reads. Raises UnsupportedModel or
    ConfigError.
    """
    if "num_experts_per_tok" not in known:
        return [None] * num_layers
    if known["hidden_act"] != "silu":
        raise UnsupportedModel(
            f"experts with hidden_act {known['hidden_act']!r} are not supported natively"
        )
    swiglu = None
    if "swiglu_alpha" in known:
        swiglu = (number(known, "swiglu_alpha"), number(known, "swiglu_limit"))
    shared_size = 0
    if "shared_expert_intermediate_size" in known:
        shared_size = size(known, "shared_expert_intermediate_size")
    count_key = "num_experts" if known["num_local_experts"] is None else "num_local_experts"
    experts = Experts(
        num_experts=size(known, count_key),
        num_chosen=size(known, "num_experts_per_tok"),
        intermediate_size=size(
            {"moe_intermediate_size": intermediate_size, **known}, "moe_intermediate_size"
        ),
        normalised="norm_topk_prob" not in known or truth(known, "norm_topk_prob"),
        bias=flags.expert_bias,
        swiglu=swiglu,
        interleaved=flags.interleaved_experts,
        shared_size=shared_size,
    )
    if experts.num_chosen > experts.num_experts:
        raise ConfigError(
            f"config.json: a token cannot go through {experts.num_chosen} of {experts.num_experts} experts"
        )
    return [experts if sparse else None for sparse in _sparse_layers(known, num_layers)]


def _sparse_layers(known: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have experts: every decoder_sparse_step-th one, except mlp_only_layers."""
    step = size({"decoder_sparse_step": 1, **known}, "decoder_sparse_step")
    dense = known.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        type(i) is int and 0 <= i < num_layers for i in dense
    ):
        raise ConfigError(
            f"config.json: mlp_only_layers must hold numbers of the {num_layers} layers, got {brief(dense)}"
        )
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def read_delta(known: Mapping[str, Any], flags: DecoderFlags, eps: float) -> DeltaHeads | None:
    """Return the heads of LINEAR layers; None for an architecture without such layers.

    Raises UnsupportedModel or ConfigError.
    """
    if "linear_num_key_heads" not in known:
        return None
    if known["hidden_act"] != "silu":
        raise UnsupportedModel(
            f"delta nets with hidden_act {known['hidden_act']!r} are not supported natively"
        )
    num_heads = size(known, "linear_num_key_heads")
    num_values = size(known, "linear_num_value_heads")
    if num_values % num_heads:
        raise ConfigError(
            f"config.json: {num_values} heads of values cannot share {num_heads} of keys"
        )
    key_dim, value_dim, kernel_size = (
        size(known, f"linear_{name}_dim") for name in ("key_head", "value_head", "conv_kernel")
    )
    interleaved = flags.interleaved_delta
    return DeltaHeads(
        num_heads, num_values // num_heads, key_dim, value_dim, kernel_size, eps, interleaved
    )


# Kinds that go by the length before it was stretched.
SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


def read_ropes(known: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Rope, ...]:
    """Return one rotation for all layers, or two: for layers of full attention, and for sliding ones.

    Raises UnsupportedModel or ConfigError.
    """
    parameters = known["rope_scaling"] or known["rope_parameters"] or {}
    theta = number(known, "rope_theta")
    if "rope_local_base_freq" not in known:
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise UnsupportedModel(
                "rope parameters by layer type are not supported for this architecture"
            )
        return (_read_rope(known, parameters, theta, head_dim, max_positions),)
    by_kind = known["rope_parameters"] or {}
    full = {**(by_kind.get("full_attention") or {}), **(known["rope_scaling"] or {})}
    sliding = by_kind.get("sliding_attention") or {}
    if by_kind and not (full and sliding):
        raise ConfigError(
            "config.json: rope_parameters must have full_attention and sliding_attention"
        )
    local_theta = number(known, "rope_local_base_freq")
    return (
        _read_rope(known, full, theta, head_dim, max_positions),
        _read_rope(known, sliding, local_theta, head_dim, max_positions),
    )


def _read_rope(
    known: Mapping[str, Any],
    declared: Mapping[str, Any],
    theta: float,
    head_dim: int,
    max_positions: int,
) -> Rope:
    parameters = dict(declared)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("su", "yarn") and "short_factor" in parameters:
        kind = "longrope"  # what the first Phi-3 checkpoints called it
    if kind in SCALED_FROM_ORIGINAL:
        name = "original_max_position_embeddings"
        parameters[name] = known[name] or parameters.get(name) or max_positions
    rotated_share = parameters.get("partial_rotary_factor", known.get("partial_rotary_factor", 1.0))
    if rotated_share != 1.0 and "partial_rotary_factor" not in known:
        raise UnsupportedModel(
            f"partial_rotary_factor {rotated_share!r} is not supported for this architecture"
        )
    rotary_dim = int(head_dim * rotated_share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"config.json: {rotary_dim} of a head's {head_dim} numbers would be rotated; that must be an even number"
        )
    parameters.setdefault("rope_theta", theta)
    rope = Rope(kind, rotary_dim, number(parameters, "rope_theta"), max_positions, parameters)
    rope.frequencies(max_positions)  # raises at start if a parameter is missing or wrong
    return rope


FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
#: Keys that say how many layers it is from one of FULL to the next, and the kind of those between.
PATTERNS = {"sliding_window_pattern": SLIDING, "full_attention_interval": LINEAR}

#: Keys that every architecture reads, with the value that a missing key stands for.
COMMON_KEYS = {
    "hidden_act": "silu",
    "original_max_position_embeddings": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class LayerConfig:
    """The part of the configuration that may differ from layer to layer.

    window: the number of tokens that a query sees, itself included; None if it sees all tokens before it.
    rope: the index of the layer's rotation.  experts: None if the layer has an MLP.
    delta: the heads of a delta net; None if the layer has attention.
    """

    window: int | None
    rope: int
    experts: Experts | None
    delta: DeltaHeads | None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's sizes and options.

    sizes: the decoder uses vocab_size to head_dim.  layers: from first to last.
    attention_scale, attention_soft_cap: as `scale` and `soft_cap` of AttentionFeatures.
    logit_soft_cap: logits become cap * tanh(logit / cap); None leaves them as they are.
    """

    flags: DecoderFlags
    sizes: ModelConfig
    rms_norm_eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    tie_word_embeddings: bool
    ropes: tuple[Rope, ...]
    layers: tuple[LayerConfig, ...]

    def kept(self, tp: TensorParallel, dtype: torch.dtype) -> Kept:
        """Return what one rank keeps of a sequence: each attention layer's features, and the delta layers' states.

        dtype: the model's.
        """
        features = []
        states = []
        for index, layer in enumerate(self.layers):
            if layer.delta is None:
                features.append(self.attention(layer, tp))
            else:
                states += layer.delta.share(tp).states(index, dtype)
        return Kept(features, states)

    def attention(self, layer: LayerConfig, tp: TensorParallel) -> AttentionFeatures:
        """Return the attention of a layer on one rank. Raises ConfigError."""
        return AttentionFeatures(
            tp.share(self.sizes.num_heads, "attention heads").length,
            tp.share_or_copy(self.sizes.num_kv_heads, "KV heads").length,
            self.sizes.head_dim,
            scale=self.attention_scale,
            window=layer.window,
            soft_cap=self.attention_soft_cap,
            has_sinks=self.flags.sinks,
        )

    def within(self, max_positions: int) -> DecoderConfig:
        """Return the configuration for sequences of at most max_positions tokens.

        A layer's window that holds a whole sequence is dropped.
        """
        layers = []
        for layer in self.layers:
            if layer.window and layer.window >= max_positions:
                layer = replace(layer, window=None)
            layers.append(layer)
        return replace(self, layers=tuple(layers))


def read_decoder_config(model: ModelConfig, flags: DecoderFlags) -> DecoderConfig:
    """Read the decoder's configuration from a checkpoint, by the architecture's flags.

    Raises UnsupportedModel for a feature that is not built, ConfigError for an impossible value.
    """
    try:
        return _read(model, flags)
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}, which a decoder needs") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"config.json holds a value of a wrong kind: {error}") from error


def _read(model: ModelConfig, flags: DecoderFlags) -> DecoderConfig:
    _refuse_unbuilt(model, flags)
    keys = {**COMMON_KEYS, **flags.keys}
    known = {key: model.values.get(key, default) for key, default in keys.items()} | dict(
        flags.fixed
    )
    kinds = _layer_kinds(known, model.num_layers)
    if SLIDING in kinds and not known.get("use_sliding_window", True):
        raise ConfigError(
            "config.json: layer_types has sliding_attention, and use_sliding_window is false"
        )
    windows = {
        FULL: None,
        LINEAR: None,
        SLIDING: size(known, "sliding_window") if SLIDING in kinds else None,
    }
    ropes = read_ropes(known, model.head_dim, written_length(model.values))
    experts = read_experts(known, flags, model.num_layers, model.intermediate_size)
    eps = number(model.values, "rms_norm_eps")
    delta = read_delta(known, flags, eps)
    attention_bias = truth(known, "attention_bias")
    name = "hidden_activation" if "hidden_activation" in known else "hidden_act"
    if known[name] not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{name} {known[name]!r} is not supported natively; supported: {', '.join(ACTIVATIONS)}"
        )
    output_bias = attention_bias
    if "attention_out_bias" in known:
        output_bias = truth(known, "attention_out_bias")
    layers = []
    for kind, layer_experts in zip(kinds, experts, strict=True):
        has_second_rope = kind == SLIDING and len(ropes) > 1
        layers.append(
            LayerConfig(
                window=windows[kind],
                rope=1 if has_second_rope else 0,
                experts=layer_experts,
                delta=delta if kind == LINEAR else None,
            )
        )
    return DecoderConfig(
        flags=flags,
        sizes=model,
        rms_norm_eps=eps,
        activation=known[name],
        qkv_bias=flags.qkv_bias or attention_bias,
        output_bias=output_bias,
        mlp_bias=truth(known, "mlp_bias"),
        attention_scale=(optional_number(known, "query_pre_attn_scalar") or model.head_dim) ** -0.5,
        attention_soft_cap=optional_number(known, "attn_logit_softcapping"),
        logit_soft_cap=optional_number(known, "final_logit_softcapping"),
        tie_word_embeddings=truth(known, "tie_word_embeddings"),
        ropes=ropes,
        layers=tuple(layers),
    )


def _layer_kinds(known: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return each layer's kind, FULL, SLIDING or LINEAR: as config.json lists them, or by the architecture's rule."""
    if known.get("layer_types"):
        kinds = list(known["layer_types"])
        if len(kinds) != num_layers:
            raise ConfigError(
                f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers"
            )
        known_kinds = {FULL, LINEAR if "linear_num_key_heads" in known else SLIDING}
        unknown = sorted(set(map(str, kinds)) - known_kinds)
        if unknown:
            raise UnsupportedModel(
                f"layers of type {', '.join(unknown)} are not supported natively"
            )
        return kinds
    patterns = PATTERNS.keys() & known.keys()
    if patterns:
        (pattern,) = patterns  # an architecture reads at most one
        step = size(known, pattern)
        return [FULL if (i + 1) % step == 0 else PATTERNS[pattern] for i in range(num_layers)]
    if known.get("sliding_window") is None or not known.get("use_sliding_window", True):
        return [FULL] * num_layers
    first = known.get("max_window_layers", 0)
    return [SLIDING if i >= first else FULL for i in range(num_layers)]


def _refuse_unbuilt(model: ModelConfig, flags: DecoderFlags) -> None:
    values = model.values
    model_type = values.get("model_type", flags.model_type)
    if model_type != flags.model_type and not model.is_text_part:
        raise UnsupportedModel(
            f"config.json names {model.architecture} and the model_type {model_type!r}; "
            f"the native decoder reads it with model_type {flags.model_type!r} only"
        )
    for key in flags.refused:
        if values.get(key) is not None:
            raise UnsupportedModel(f"{model.architecture} with {key} in config.json is not native")
    if values.get("use_bidirectional_attention") or values.get("is_causal") is False:
        raise UnsupportedModel(
            "this model attends to later tokens too, and a completion has no later tokens"
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"config.json: {model.num_heads} attention heads cannot share {model.num_kv_heads} KV heads"
        )
