"""Which dtype a configuration's name stands for on this machine; loads no torch, save to look for a GPU."""

from dataclasses import dataclass

from engine.checkpoint.model_config import dtype_name
from engine.cpu_kernels.processor import multiplies_bfloat16


@dataclass(frozen=True)
class ServedDtype:
    """name: "float32" for example.  reason: why another one is served or would be faster; None if neither."""

    name: str
    reason: str | None = None


def served_dtype(wanted: str, checkpoint_dtype: str, device: str) -> ServedDtype:
    """What a model is computed in. wanted, device: as EngineConfig has them.

    "auto" is the checkpoint's dtype, on a CPU that would have to convert each number of it float32. Raises
    ConfigError for a dtype that is not supported or a device that cannot be used.
    """
    name = dtype_name(wanted, checkpoint_dtype)
    if name == "float32" or (name == "bfloat16" and multiplies_bfloat16()) or not _is_cpu(device):
        return ServedDtype(name)
    lacking = "this CPU has neither avx512_bf16 nor amx_bf16"
    if name == "float16":
        lacking = "on CPUs there are kernels for float32 and bfloat16 only"
    if wanted == "auto":
        return ServedDtype("float32", f"dtype='auto' takes float32 rather than the checkpoint's {name}: {lacking}")
    return ServedDtype(name, f"dtype={name!r} is slower than 'float32' here: {lacking}")


def _is_cpu(device: str) -> bool:
    if device == "cpu":
        return True
    from engine.run.device import resolve_device  # it loads torch, which alone knows of GPUs

    return resolve_device(device).type == "cpu"
