"""Values of config.json, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as brief  # short
from typing import Any

from engine.checkpoint.model_config import MAX_SIZE
from engine.errors import ConfigError


def number(values: Mapping[str, Any], name: str) -> float:
    """Raises ConfigError unless it is a number above 0, KeyError if it is not there."""
    value = values[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {name} must be a number above 0, got {brief(value)}")
    return float(value)


def optional_number(values: Mapping[str, Any], name: str) -> float | None:
    """The same, but it may be null or not there."""
    return None if values.get(name) is None else number(values, name)


def size(values: Mapping[str, Any], name: str) -> int:
    """Raises ConfigError unless it is a size that can be, KeyError if it is not there."""
    value = values[name]
    if type(value) is not int or not 0 < value < MAX_SIZE:
        raise ConfigError(f"config.json: {name} must be between 1 and {MAX_SIZE - 1}, got {brief(value)}")
    return value


def truth(values: Mapping[str, Any], name: str) -> bool:
    """False if it is null or not there. Raises ConfigError unless it is true or false."""
    value = values.get(name) or False
    if type(value) is not bool:
        raise ConfigError(f"config.json: {name} must be true or false, got {brief(value)}")
    return value
