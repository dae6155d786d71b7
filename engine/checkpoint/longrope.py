"""Where a longrope model's configuration parts short sequences from long ones."""

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.model_config import ModelConfig


def longrope_length(model: ModelConfig) -> int | None:
    """Most tokens of the sequences that have the short factors, None for a model that has one set alone.

    It has those of long sequences for all, if there may be a longer one.
    """
    given = model.values.get("rope_scaling") or model.values.get("rope_parameters")
    parameters = given if isinstance(given, Mapping) else {}
    if "short_factor" not in parameters:
        return None
    original: Any = model.values.get("original_max_position_embeddings")
    if original is None:
        original = parameters.get("original_max_position_embeddings")
    return original if isinstance(original, int) else None
