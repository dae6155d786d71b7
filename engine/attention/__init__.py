"""Attention over the paged KV cache: backends are found by name and imported only when chosen."""

import logging
from importlib import import_module
from importlib.util import find_spec

import torch

from engine.attention.base import KernelBackend
from engine.errors import ConfigError, NotDeterministic

#: Each backend's module and class.
BACKENDS = {
    "torch": ("torch_backend", "TorchBackend"),
    "cpu": ("cpu_backend", "CpuBackend"),
    "triton": ("triton_backend", "TritonBackend"),
    "flash_attn": ("flash_attn_backend", "FlashAttnBackend"),
}

logger = logging.getLogger(__name__)


def load_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    *,
    block_size: int = 16,
    deterministic: bool = False,
) -> KernelBackend:
    """Return the backend of that name for these dtypes. Raises ConfigError.

    "auto" is the best one for device and dtype. kv_cache_dtype, block_size: as EngineConfig has them.
    deterministic: the backend's attention to a query has the same bits whatever else is computed with it; raises
    NotDeterministic where no backend does that.
    """
    chosen = _choose(device, dtype, kv_cache_dtype) if name == "auto" else name
    if deterministic and chosen != "cpu":
        raise NotDeterministic(
            f"deterministic=True is built for attention_backend='cpu', which needs device='cpu', numba, "
            f"kv_cache_dtype='auto' and dtype='float32' or 'bfloat16'; this would be {chosen!r} on "
            f"{device.type}, whose sums depend on what is computed together; change that, or leave "
            "deterministic out"
        )
    if chosen not in BACKENDS:
        known = ", ".join(map(repr, ("auto", *sorted(BACKENDS))))
        raise ConfigError(
            f"attention_backend={chosen!r} is no attention backend; use one of {known}"
        )
    if chosen in ("triton", "flash_attn") and find_spec("triton") is None:
        raise ConfigError(
            f"attention_backend={chosen!r} needs the package triton, which is not installed here: "
            "pip install triton (torch's builds for CUDA bring it along), or use 'torch'"
        )
    module_name, class_name = BACKENDS[chosen]
    module = import_module(f"engine.attention.{module_name}")
    backend: type[KernelBackend] = getattr(module, class_name)
    backend.check(device, dtype)
    if block_size % backend.block_multiple:
        raise ConfigError(
            f"attention_backend={chosen!r} takes KV blocks of a multiple of {backend.block_multiple} tokens, "
            f"not block_size={block_size}; set block_size={backend.block_multiple}, or use 'triton'"
        )
    if kv_cache_dtype != "auto" and (problem := backend.fp8_problem(device)):
        raise ConfigError(
            f"attention_backend={chosen!r} cannot keep keys and values in "
            f"kv_cache_dtype={kv_cache_dtype!r}: {problem}; use 'torch', or leave kv_cache_dtype out"
        )
    if deterministic:
        backend = module.DeterministicCpuBackend
    return backend(device)


def _choose(device: torch.device, dtype: torch.dtype, kv_cache_dtype: str) -> str:
    """Return the best backend that is installed."""
    if device.type == "cpu":
        from engine.attention.cpu_backend import CpuBackend

        problem = CpuBackend.problem(device, dtype)
        if kv_cache_dtype != "auto":
            problem = f"it keeps no keys and values in {kv_cache_dtype}"
        if problem:
            logger.info(
                "attention_backend='auto' takes 'torch', which is slower than 'cpu': %s", problem
            )
        return "torch" if problem else "cpu"
    if device.type != "cuda":
        return "torch"
    return "triton" if find_spec("triton") else "torch"
