"""The length at which a longrope model changes its factors."""

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.model_config import ModelConfig


def longrope_length(model: ModelConfig) -> int | None:
    """Return the most tokens for the short factors, None for a model with one set of factors.

    If longer sequences may come, all sequences take the long factors.
    """
    given = model.values.get("rope_scaling") or model.values.get("rope_parameters")
    parameters = given if isinstance(given, Mapping) else {}
    if "short_factor" not in parameters:
        return None
    original: Any = model.values.get("original_max_position_embeddings")
    if original is None:
        original = parameters.get("original_max_position_embeddings")
    return original if isinstance(original, int) else None
