"""Mixtures of experts as config.json tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as brief  # short
from typing import Any

from engine.errors import ConfigError, UnsupportedModel
from engine.layers.moe import ClampedSwiglu, Experts
from engine.models.config_values import number, size, truth
from engine.models.registry import DecoderFlags


def read_experts(
    known: Mapping[str, Any], flags: DecoderFlags, num_layers: int, intermediate_size: int
) -> list[Experts | None]:
    """What each layer has in place of an MLP; None for those with one, as all layers of dense models are.

    known: the architecture's keys.  Raises UnsupportedModel or ConfigError for what no layer can compute.
    """
    if "num_experts_per_tok" not in known:
        return [None] * num_layers
    if known["hidden_act"] != "silu":
        raise UnsupportedModel(f"experts with hidden_act {known['hidden_act']!r} are not supported natively")
    experts = Experts(
        num_experts=size(known, "num_experts" if known["num_local_experts"] is None else "num_local_experts"),
        num_chosen=size(known, "num_experts_per_tok"),
        intermediate_size=size(
            {"moe_intermediate_size": intermediate_size, **known}, "moe_intermediate_size"
        ),
        normalised="norm_topk_prob" not in known or truth(known, "norm_topk_prob"),
        bias=flags.expert_bias,
        swiglu=ClampedSwiglu(number(known, "swiglu_alpha"), number(known, "swiglu_limit"))
        if "swiglu_alpha" in known
        else None,
        interleaved=flags.interleaved_experts,
    )
    if experts.num_chosen > experts.num_experts:
        raise ConfigError(
            f"config.json: a token cannot go through {experts.num_chosen} of {experts.num_experts} experts"
        )
    return [experts if sparse else None for sparse in _sparse_layers(known, num_layers)]


def _sparse_layers(known: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th one, but for those of mlp_only_layers."""
    step = size({"decoder_sparse_step": 1, **known}, "decoder_sparse_step")
    dense = known.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < num_layers for i in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers must hold numbers of the {num_layers} layers, got {brief(dense)}"
        )
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]
