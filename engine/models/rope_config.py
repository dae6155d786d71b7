"""A model's rotations as config.json tells of them, with the keys of transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError, UnsupportedModel
from engine.layers.rotary_scaling import Rope
from engine.models.config_values import number

SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")  # kinds that know the length before they stretched it


def read_ropes(known: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Rope, ...]:
    """The rotation of all layers, or where the architecture has two, that of full and of sliding layers.

    known: the architecture's keys.  Raises UnsupportedModel or ConfigError for what no layer can compute.
    """
    parameters = known["rope_scaling"] or known["rope_parameters"] or {}
    theta = number(known, "rope_theta")
    if "rope_local_base_freq" not in known:
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise UnsupportedModel("rope parameters by layer type are not supported for this architecture")
        return (_read_rope(known, parameters, theta, head_dim, max_positions),)
    by_kind = known["rope_parameters"] or {}
    full = {**(by_kind.get("full_attention") or {}), **(known["rope_scaling"] or {})}
    sliding = by_kind.get("sliding_attention") or {}
    if by_kind and not (full and sliding):
        raise ConfigError("config.json: rope_parameters must have full_attention and sliding_attention")
    local_theta = number(known, "rope_local_base_freq")
    return (
        _read_rope(known, full, theta, head_dim, max_positions),
        _read_rope(known, sliding, local_theta, head_dim, max_positions),
    )


def _read_rope(
    known: Mapping[str, Any], given: Mapping[str, Any], theta: float, head_dim: int, max_positions: int
) -> Rope:
    parameters = dict(given)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("su", "yarn") and "short_factor" in parameters:
        kind = "longrope"  # what the first Phi-3 checkpoints called it
    if kind in SCALED_FROM_ORIGINAL:
        if known["original_max_position_embeddings"] is not None:
            parameters["original_max_position_embeddings"] = known["original_max_position_embeddings"]
        parameters.setdefault("original_max_position_embeddings", max_positions)
    turning = parameters.get("partial_rotary_factor", known.get("partial_rotary_factor", 1.0))
    if turning != 1.0 and "partial_rotary_factor" not in known:
        raise UnsupportedModel(f"partial_rotary_factor {turning!r} is not supported for this architecture")
    rotary_dim = int(head_dim * turning)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"config.json: of a head's {head_dim} numbers {rotary_dim} would turn; it must be an even number"
        )
    parameters.setdefault("rope_theta", theta)
    rope = Rope(kind, rotary_dim, number(parameters, "rope_theta"), max_positions, parameters)
    rope.frequencies(max_positions)  # finds at start what is missing or wrong in them
    return rope
