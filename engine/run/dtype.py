"""Turns a configuration's dtype into the one that is served here; loads torch only to look for a GPU."""

from dataclasses import dataclass

from engine.cpu_kernels.processor import multiplies_bfloat16
from engine.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ServedDtype:
    """The name of the dtype that is served, such as "float32".

    reason: why the checkpoint's own dtype is not served, or why this one is slow here; None if there is nothing to say.
    """

    name: str
    reason: str | None = None


def served_dtype(wanted: str, checkpoint_dtype: str, device: str) -> ServedDtype:
    """Return the dtype that a model computes in. wanted, device: of EngineConfig.

    "auto" is the checkpoint's dtype, or float32 on a CPU that would have to convert every number. Raises ConfigError
    for an unsupported dtype or device.
    """
    name = checkpoint_dtype if wanted == "auto" else wanted
    if name not in DTYPES:
        whose = f": the checkpoint's is {name}" if wanted == "auto" else ""
        raise ConfigError(
            f"dtype={wanted!r} cannot be used{whose}; supported are 'auto', {', '.join(map(repr, DTYPES))}"
        )
    if name == "float32" or (name == "bfloat16" and multiplies_bfloat16()) or not _is_cpu(device):
        return ServedDtype(name)
    lacking = "this CPU has neither avx512_bf16 nor amx_bf16"
    if name == "float16":
        lacking = "on CPUs there are kernels for float32 and bfloat16 only"
    if wanted == "auto":
        return ServedDtype(
            "float32", f"dtype='auto' takes float32 rather than the checkpoint's {name}: {lacking}"
        )
    return ServedDtype(name, f"dtype={name!r} is slower than 'float32' here: {lacking}")


def _is_cpu(device: str) -> bool:
    if device == "cpu":
        return True
    from engine.run.device import resolve_device  # it loads torch, which alone knows of GPUs

    return resolve_device(device).type == "cpu"
