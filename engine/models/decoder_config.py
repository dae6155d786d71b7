"""DecoderConfig: what the native decoder reads of a checkpoint's configuration, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError, UnsupportedModel
from engine.layers.activation import ACTIVATIONS
from engine.layers.moe import Experts
from engine.layers.rotary_scaling import Rope
from engine.models.config_values import number, optional_number, size, truth
from engine.models.experts_config import read_experts
from engine.models.registry import DecoderFlags
from engine.models.rope_config import read_ropes

FULL, SLIDING = "full_attention", "sliding_attention"

#: What every architecture reads, with the value that a missing key stands for.
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
    """What one layer is, where a model's layers differ.

    window: tokens that a query sees, itself included; None if it sees all before it.
    rope: which of the model's rotations it has.
    experts: what it has in place of an MLP; None if it has an MLP.
    """

    window: int | None
    rope: int
    experts: Experts | None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's sizes and what it computes; `layers` in their order, first to last.

    attention_scale, attention_soft_cap: as in AttentionFeatures.
    logit_soft_cap: logits become cap * tanh(logit / cap); None if not.
    """

    flags: DecoderFlags
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
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

    def within(self, max_positions: int) -> DecoderConfig:
        """The same for sequences of so many tokens at most: a window that holds them all is none."""
        layers = [
            replace(layer, window=None) if layer.window and layer.window >= max_positions else layer
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))


def read_decoder_config(model: ModelConfig, flags: DecoderFlags) -> DecoderConfig:
    """What the decoder with these flags needs of a checkpoint.

    Raises UnsupportedModel for a feature that is not built, ConfigError for a value that none can have.
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
    known = {key: model.values.get(key, default) for key, default in keys.items()} | dict(flags.fixed)
    kinds = _layer_kinds(known, model.num_layers)
    windows = {FULL: None, SLIDING: _window(known) if SLIDING in kinds else None}
    ropes = read_ropes(known, model.head_dim, model.max_position_embeddings)
    experts = read_experts(known, flags, model.num_layers, model.intermediate_size)
    attention_bias = truth(known, "attention_bias")
    return DecoderConfig(
        flags=flags,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=number(model.values, "rms_norm_eps"),
        activation=_activation(known),
        qkv_bias=flags.qkv_bias or attention_bias,
        output_bias=truth(known, "attention_out_bias") if "attention_out_bias" in known else attention_bias,
        mlp_bias=truth(known, "mlp_bias"),
        attention_scale=(optional_number(known, "query_pre_attn_scalar") or model.head_dim) ** -0.5,
        attention_soft_cap=optional_number(known, "attn_logit_softcapping"),
        logit_soft_cap=optional_number(known, "final_logit_softcapping"),
        tie_word_embeddings=truth(known, "tie_word_embeddings"),
        ropes=ropes,
        layers=tuple(
            LayerConfig(windows[kind], int(kind == SLIDING and len(ropes) > 1), each)
            for kind, each in zip(kinds, experts, strict=True)
        ),
    )


def _layer_kinds(known: Mapping[str, Any], num_layers: int) -> list[str]:
    """FULL or SLIDING for each layer, as config.json lists them or by the architecture's own rule."""
    if known.get("layer_types"):
        kinds = list(known["layer_types"])
        if len(kinds) != num_layers:
            raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
        if unknown := sorted(set(map(str, kinds)) - {FULL, SLIDING}):
            raise UnsupportedModel(f"layers of type {', '.join(unknown)} are not supported natively")
        return kinds
    if "sliding_window_pattern" in known:
        pattern = size(known, "sliding_window_pattern")
        return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    if known.get("sliding_window") is None or not known.get("use_sliding_window", True):
        return [FULL] * num_layers
    first = known.get("max_window_layers", 0)
    return [SLIDING if i >= first else FULL for i in range(num_layers)]


def _window(known: Mapping[str, Any]) -> int:
    if not known.get("use_sliding_window", True):
        raise ConfigError("config.json: layer_types has sliding_attention, and use_sliding_window is false")
    return size(known, "sliding_window")


def _activation(known: Mapping[str, Any]) -> str:
    name = "hidden_activation" if "hidden_activation" in known else "hidden_act"
    if known[name] not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{name} {known[name]!r} is not supported natively; supported: {', '.join(ACTIVATIONS)}"
        )
    activation: str = known[name]
    return activation


def _refuse_unbuilt(model: ModelConfig, flags: DecoderFlags) -> None:
    values = model.values
    found = values.get("model_type", flags.model_type)
    if found != flags.model_type and not model.is_text_part:
        raise UnsupportedModel(
            f"config.json names {model.architecture} and the model_type {found!r}; it is native as "
            f"{flags.model_type!r}"
        )
    if others := [key for key in flags.refused if values.get(key) is not None]:
        raise UnsupportedModel(f"{model.architecture} with {others[0]} in config.json is not native")
    if values.get("use_bidirectional_attention") or values.get("is_causal") is False:
        raise UnsupportedModel("this model attends to later tokens too, which no completion can")
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"config.json: {model.num_heads} attention heads cannot share {model.num_kv_heads} KV heads"
        )
