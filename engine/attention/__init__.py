"""Attention backends, found by name and imported only when chosen."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend, AttentionMetadata
from engine.errors import ConfigError

NOT_BUILT = ("cpu", "triton", "flash_attn")

__all__ = ["AttentionBackend", "AttentionMetadata", "load_backend"]


def load_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend of that name, "auto" being the best one for the device. Raises ConfigError."""
    if name in ("auto", "torch"):
        from engine.attention.torch_backend import TorchAttention

        return TorchAttention(device)
    problem = "is not built yet" if name in NOT_BUILT else "is no attention backend"
    raise ConfigError(f"attention_backend={name!r} {problem}; use 'auto' or 'torch'")
