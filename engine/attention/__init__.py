"""Attention backends, found by name and imported only when chosen."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from engine.attention.base import AttentionBackend, AttentionMetadata, CapturableBackend
from engine.errors import ConfigError

FLASH_ATTN_DTYPES = (torch.float16, torch.bfloat16)
FLASH_ATTN_BLOCK_MULTIPLE = 256  # tokens: its paged calls refuse blocks of any other size
NEVER_RAN_ON_GPU = ("torch", "triton")

__all__ = ["AttentionBackend", "AttentionMetadata", "CapturableBackend", "load_backend"]

logger = logging.getLogger(__name__)


def load_backend(
    name: str, device: torch.device, dtype: torch.dtype = torch.float32, block_size: int = 16
) -> AttentionBackend:
    """Return the backend of that name for queries, keys and values of that dtype. Raises ConfigError.

    "auto" is the best one for device and dtype. block_size: tokens of a KV block.
    """
    if name == "auto":
        name = _choose(device, dtype)
    if name == "torch":
        from engine.attention.torch_backend import TorchAttention

        return TorchAttention(device)
    if name == "triton":
        return _load_triton(device)
    if name == "cpu":
        return _load_cpu(device, dtype)
    if name == "flash_attn":
        return _load_flash_attn(device, dtype, block_size)
    raise ConfigError(
        f"attention_backend={name!r} is no attention backend; use 'auto', 'cpu', 'flash_attn', 'torch' or "
        "'triton'"
    )


def _choose(device: torch.device, dtype: torch.dtype) -> str:
    """The best backend that is installed, with a warning if it has never run on such a device."""
    if device.type == "cpu":
        problem = _cpu_problem(device, dtype)
        if problem:
            logger.info("attention_backend='auto' takes 'torch', which is slower than 'cpu': %s", problem)
        return "torch" if problem else "cpu"
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


def _load_flash_attn(device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionBackend:
    if device.type != "cuda":
        problem = f"it does not run on device={device.type!r}; use 'auto' there"
    elif dtype not in FLASH_ATTN_DTYPES:
        shown = str(dtype).removeprefix("torch.")
        problem = f"it computes in float16 and bfloat16, not in {shown}; set dtype, or use 'triton'"
    elif block_size % FLASH_ATTN_BLOCK_MULTIPLE:
        problem = (
            f"its KV blocks hold a multiple of {FLASH_ATTN_BLOCK_MULTIPLE} tokens, not "
            f"block_size={block_size}; set block_size={FLASH_ATTN_BLOCK_MULTIPLE}, or use 'triton'"
        )
    elif missing := [name for name in ("flash_attn", "triton") if find_spec(name) is None]:
        problem = (
            f"{' and '.join(missing)} cannot be imported; pip install flash-attn triton, or use 'triton'"
        )
    else:
        from engine.attention.flash_attn_backend import FlashAttention

        return FlashAttention(device)
    raise ConfigError(f"attention_backend='flash_attn' cannot be used: {problem}")


def _load_cpu(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    problem = _cpu_problem(device, dtype)
    if problem:
        raise ConfigError(f"attention_backend='cpu' cannot be used: {problem}; or use 'torch'")
    from engine.attention.cpu_backend import CpuAttention

    return CpuAttention(device)


def _cpu_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the cpu backend cannot serve these, and what to do; None if it can."""
    if device.type != "cpu":
        return f"it does not run on device={device.type!r}, set device='cpu'"
    if dtype != torch.float32:
        return (
            f"its kernels compute in float32, not in {str(dtype).removeprefix('torch.')}; set dtype='float32'"
        )
    try:
        import numba  # noqa: F401 - raises ImportError also beside a numpy it does not know
    except ImportError as error:
        return f"the package numba cannot be imported ({error}), pip install numba"
    return None
