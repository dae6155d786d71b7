"""Which device a configuration's name stands for on this machine."""

from __future__ import annotations

import torch

from engine.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Turn "auto" or a device string into a device. Raises ConfigError if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no torch device; use 'auto', 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}, but torch finds no CUDA device here; use 'cpu' or fix the driver"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    return device


def overlaps(async_scheduling: bool | None, device: str) -> bool:
    """Whether a step is scheduled while the one before runs: None does so on GPUs."""
    if async_scheduling is not None:
        return async_scheduling
    return resolve_device(device).type == "cuda"
