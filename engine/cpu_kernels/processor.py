"""What this machine's processor has instructions for, as the operating system lists it; loads no torch."""

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@functools.cache
def processor_flags() -> frozenset[str]:
    """The names of its extensions as Linux has them; none on another system or another kind of processor."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(listed.partition(":")[2].split())


def multiplies_bfloat16() -> bool:
    """Whether it multiplies bfloat16 numbers as they are, rather than as float32 after a conversion."""
    return not BFLOAT16_FLAGS.isdisjoint(processor_flags())
