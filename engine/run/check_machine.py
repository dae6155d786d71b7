"""Checks of the machine before anything is loaded: GPU or processors, memory, folders for kernels."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from engine.attention import load_backend
from engine.errors import ConfigError
from engine.run.config import EngineConfig
from engine.run.device import resolve_device
from engine.run.dtype import served_dtype
from engine.run.forward.memory import allowed_bytes
from engine.run.observation import Observation, fault_of

GIB = 2**30
#: The folder through which ranks of one machine exchange tensors.
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 256 * 2**20


def check_machine(config: EngineConfig) -> Iterator[Observation]:
    """Check the parts of the machine that the configuration would use."""
    try:
        device = resolve_device(config.device)
    except ConfigError as error:
        yield fault_of("gpu", error)
        return
    if device.type == "cuda":
        yield from _check_gpus(config)
        yield _check_kernel_folder(
            Path(os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")).expanduser()
        )
    else:
        reason = "no GPU" if config.device == "auto" else f"device={config.device!r} is set"
        yield Observation("gpu", "ok", f"{reason}: runs on CPU, {torch.get_num_threads()} threads")
        yield _check_cpu_kernels()
    if config.tensor_parallel_size > 1:
        yield from _check_shared_memory()


def free_memory(config: EngineConfig) -> tuple[int, str]:
    """Return the bytes free for weights and pool on each rank, and the memory's name. Raises ConfigError."""
    if resolve_device(config.device).type != "cuda":
        return allowed_bytes() // config.tensor_parallel_size, "this process may still take"
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    left = int(total_bytes * config.memory_utilization) - (total_bytes - free_bytes)
    return max(0, left), "free of the GPU within memory_utilization"


def _check_gpus(config: EngineConfig) -> Iterator[Observation]:
    count = torch.cuda.device_count()
    wanted = config.tensor_parallel_size
    if count < wanted:
        text = f"torch sees {count} GPUs, and tensor_parallel_size={wanted}"
        mend = "list more in CUDA_VISIBLE_DEVICES, or lower tensor_parallel_size"
        yield Observation("gpu", "fault", text, mend)
    kinds = torch.cuda.get_arch_list()
    for index in range(min(count, wanted)):
        major, minor = torch.cuda.get_device_capability(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        text = (
            f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}, "
            f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free, torch {torch.__version__}"
        )
        if not any(kind.startswith((f"sm_{major}", "compute_")) for kind in kinds):
            mend = f"install a torch that is built for sm_{major}{minor}; this one is for {' '.join(kinds)}"
            yield Observation("gpu", "fault", text, mend)
        elif free_bytes < (1 - config.memory_utilization) * total_bytes:
            mend = "see what else runs there (nvidia-smi), or lower memory_utilization"
            yield Observation("gpu", "warning", f"{text}: others have taken most of it", mend)
        else:
            yield Observation("gpu", "ok", text)


def _check_cpu_kernels() -> Observation:
    try:
        from engine.cpu_kernels.kernel import cache_root, exposure
    except ImportError as error:
        text = f"Numba does not import ({error}): torch computes attention, slower"
        return Observation(
            "kernels",
            "warning",
            text,
            "pip install --upgrade numba, to a version that knows this numpy",
        )
    return _check_kernel_folder(cache_root(), exposure)


def _check_kernel_folder(
    folder: Path, exposure: Callable[[Path], str | None] = lambda folder: None
) -> Observation:
    """Check whether compiled kernels can be kept in a folder.

    exposure: returns how other users could write into a folder; None if they cannot.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    problem = exposure(existing.resolve())
    if problem is None and not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} cannot be written to"
    if problem is None:
        return Observation("kernels", "ok", f"compiled kernels are kept in {folder}")
    mend = (
        f"correct that, or set XDG_CACHE_HOME to a folder of this user; {folder} holds nothing else"
    )
    return Observation("kernels", "warning", f"kernels are compiled at each start: {problem}", mend)


def _check_shared_memory(folder: Path = SHARED_MEMORY) -> Iterator[Observation]:
    try:
        file_system = os.statvfs(folder)
    except OSError as error:
        yield Observation(
            "memory", "warning", f"{folder} is missing ({error.strerror})", f"mount {folder}"
        )
        return
    free_bytes = file_system.f_bavail * file_system.f_frsize
    if free_bytes < MIN_SHARED_BYTES:
        found_text = (
            f"{folder} has {free_bytes / 2**20:.0f} MiB free, which ranks exchange tensors in"
        )
        yield Observation(
            "memory", "warning", found_text, "start the container with --shm-size=1g or more"
        )


def check_support(config: EngineConfig, checkpoint_dtype: str) -> None:
    """Raise ConfigError for a device, dtype or attention backend that cannot be used here.

    The backend is checked in deterministic mode, or if it is named and there is one rank: ranks check their own GPU.
    """
    device = resolve_device(config.device)
    dtype: torch.dtype = getattr(
        torch, served_dtype(config.dtype, checkpoint_dtype, config.device).name
    )
    is_named = config.attention_backend != "auto" and config.tensor_parallel_size == 1
    if is_named or config.deterministic:
        load_backend(
            config.attention_backend, device, dtype, config.kv_cache_dtype,
            block_size=config.block_size, deterministic=config.deterministic,
        )  # fmt: skip
