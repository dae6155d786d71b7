"""Whether this machine has what a configuration names; found out before anything is loaded."""

from __future__ import annotations

import torch

from engine.attention import load_backend
from engine.run.config import EngineConfig
from engine.run.machine.device import resolve_device
from engine.run.machine.dtype import served_dtype


def check_support(config: EngineConfig, checkpoint_dtype: str) -> None:
    """Raise ConfigError for a device, dtype or attention backend that cannot be used here.

    A backend is looked at where it is named and there is one rank: ranks look by themselves, each at its GPU.
    What is to be deterministic runs on no GPU.
    """
    device = resolve_device(config.device)
    dtype: torch.dtype = getattr(torch, served_dtype(config.dtype, checkpoint_dtype, config.device).name)
    is_named = config.attention_backend != "auto" and config.tensor_parallel_size == 1
    if is_named or config.deterministic:
        load_backend(
            config.attention_backend,
            device,
            dtype,
            config.block_size,
            config.kv_cache_dtype,
            deterministic=config.deterministic,
        )
