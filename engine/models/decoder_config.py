"""DecoderConfig: what the native decoder reads of a checkpoint's configuration, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown  # short
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError, UnsupportedModel


@dataclass(frozen=True)
class DecoderFlags:
    """What tells one Llama-like architecture from another.

    qk_norm: queries and keys are normalised per head before the rotation (Qwen3).
    """

    qk_norm: bool


@dataclass(frozen=True)
class LayerConfig:
    """What one layer is, where a model's layers differ.

    window: tokens that a query sees, itself included; None if it sees all before it.
    """

    window: int | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's sizes and what it computes; `layers` in their order, first to last."""

    flags: DecoderFlags
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    layers: tuple[LayerConfig, ...]


def read_decoder_config(model: ModelConfig, flags: DecoderFlags) -> DecoderConfig:
    """What the decoder with these flags needs of a checkpoint.

    Raises UnsupportedModel for a feature that is not built, ConfigError for a value that none can have.
    """
    values = model.values
    try:
        _refuse_unbuilt(values)
        return DecoderConfig(
            flags=flags,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rms_norm_eps=_number(values, "rms_norm_eps"),
            rope_theta=_rope_theta(values),
            tie_word_embeddings=_truth(values, "tie_word_embeddings"),
            attention_bias=_truth(values, "attention_bias"),
            layers=(LayerConfig(),) * model.num_layers,
        )
    except KeyError as error:
        raise ConfigError(
            f"config.json has no {error.args[0]!r}, which {model.architecture} needs"
        ) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"config.json holds a value of a wrong kind: {error}") from error


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {name} must be a number above 0, got {shown(value)}")
    return float(value)


def _truth(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name) or False
    if type(value) is not bool:
        raise ConfigError(f"config.json: {name} must be true or false, got {shown(value)}")
    return value


def _refuse_unbuilt(values: Mapping[str, Any]) -> None:
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(
            f"quantized weights ({method}) are not supported; use an unquantized checkpoint"
        )
    layer_types = values.get("layer_types") or ["full_attention"]
    if values.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModel("sliding-window attention is in use in this model and is not supported")
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; only 'silu' is")


def _rope_theta(values: Mapping[str, Any]) -> float:
    """theta from `rope_parameters` (transformers 5), else the top-level `rope_theta`."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise UnsupportedModel(f"rope type {kind!r} is not supported; only 'default' is")
    return float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0)
