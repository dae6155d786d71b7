"""The configured device, and the room on a GPU for the KV pool."""

import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from engine.errors import ConfigError

#: A file of NVIDIA's driver, if one is loaded.
DRIVER = Path("/proc/driver/nvidia/version")
#: The folder with a file for each GPU.
DEVICES = Path("/dev")
#: A GPU with this many bytes of memory runs more sequences at once by default.
LARGE_MEMORY = 70 << 30


def resolve_device(name: str) -> torch.device:
    """Turn "auto" or a device string into a device.

    Raises ConfigError if it cannot be used. "auto" raises it too if there is a GPU that torch does not find: a CPU
    would take a hundred times as long.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        sign = sign_of_gpu()
        if sign:
            raise ConfigError(
                f"there is a GPU ({sign}), and torch {torch.__version__} cannot use it "
                f"({_problem_of_torch()}); install a torch whose CUDA the driver knows (nvidia-smi names the "
                "newest), give the container the GPU (--gpus all), correct CUDA_VISIBLE_DEVICES, or set "
                "device=cpu to compute on the CPU all the same"
            )
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device={name!r} is no torch device; use 'auto', 'cpu' or 'cuda'"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}, but torch finds no CUDA device here; use 'cpu' or fix the driver"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    return device


def numbered(device: torch.device) -> torch.device:
    """Return the device, with the number of the thread's current GPU if it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the thread's current one within the block: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def default_num_seqs(name: str) -> int:
    """Return how many sequences run at once by default. name: of EngineConfig.device.

    A decode step reads all weights once, however many sequences it has. On a large GPU the pool holds more than 256.
    Raises ConfigError if the device cannot be used.
    """
    device = resolve_device(name)
    if device.type != "cuda":
        return 256
    memory = torch.cuda.get_device_properties(device).total_memory
    return 1024 if memory >= LARGE_MEMORY else 256


def sign_of_gpu() -> str:
    """Return what shows that there is an NVIDIA GPU; "" if there is none, or it is hidden on purpose."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if DRIVER.exists():
        return f"{DRIVER}: {DRIVER.read_text().splitlines()[0]}"
    file = next(DEVICES.glob("nvidia[0-9]*"), None)
    if file:
        return str(file)
    try:  # under WSL this is the only sign
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (
        f"nvidia-smi: {listed.stdout.splitlines()[0]}" if listed.stdout.startswith("GPU ") else ""
    )


def _problem_of_torch() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "it finds none"


# Allocations are rounded up to segments of 2 MiB, and a driver keeps something for modules loaded later.
SPARE_BYTES = 64 * 2**20


class GpuMemory:
    """One device's memory as the driver and torch's allocator count it, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        """The memory's size."""
        return torch.cuda.mem_get_info(self._device)[1]

    def used_bytes(self) -> int:
        """The bytes that all processes take, once torch has given back its unused cache."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return how many more bytes torch has reserved at the peak of `run`; fragments count as taken."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before
