"""The instruction set extensions of this machine's processor, as Linux lists them. Loads no torch."""

import functools
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@functools.cache
def processor_flags() -> frozenset[str]:
    """Return Linux's names of the processor's extensions; none on another system or kind of processor."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(listed.partition(":")[2].split())


def multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 numbers without converting them to float32."""
    return not BFLOAT16_FLAGS.isdisjoint(processor_flags())


def is_x86() -> bool:
    """Return whether the processor is an x86-64 one."""
    return platform.machine() in ("x86_64", "AMD64")
