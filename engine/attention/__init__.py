"""Attention backends, found by name and imported only when chosen."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from engine.attention.base import AttentionBackend, AttentionMetadata, CapturableBackend
from engine.errors import ConfigError

NOT_BUILT = ("cpu", "flash_attn")
NEVER_RAN_ON_GPU = ("torch", "triton")

__all__ = ["AttentionBackend", "AttentionMetadata", "CapturableBackend", "load_backend"]

logger = logging.getLogger(__name__)


def load_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend of that name, "auto" being the best one for the device. Raises ConfigError."""
    if name == "auto":
        name = _choose(device)
    if name == "torch":
        from engine.attention.torch_backend import TorchAttention

        return TorchAttention(device)
    if name == "triton":
        return _load_triton(device)
    problem = "is not built yet" if name in NOT_BUILT else "is no attention backend"
    raise ConfigError(f"attention_backend={name!r} {problem}; use 'auto', 'torch' or 'triton'")


def _choose(device: torch.device) -> str:
    """The best backend that is installed, with a warning if it has never run on such a device."""
    if device.type != "cuda":
        return "torch"
    name = "triton" if find_spec("triton") else "torch"
    if name in NEVER_RAN_ON_GPU:
        logger.warning(
            "attention_backend='auto' takes %r, which is tested on CPUs only and has not been run on a GPU "
            "yet: compare its output with attention_backend='torch' on a CPU before you rely on it",
            name,
        )
    return name


def _load_triton(device: torch.device) -> AttentionBackend:
    if find_spec("triton") is None:
        raise ConfigError(
            "attention_backend='triton' needs the package triton, which is not installed here: "
            "pip install triton (torch's builds for CUDA bring it along), or use 'torch'"
        )
    from engine.attention.triton_backend import TritonAttention

    return TritonAttention(device)
