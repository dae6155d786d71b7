"""How a worker's process allocates memory."""

from __future__ import annotations

import ctypes
import os

# glibc's mallopt parameters (malloc.h).
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8

_MAPPED_BYTES = 1 << 18
"""Larger blocks, such as a decoded page, are mapped one by one and go back to the kernel when freed."""


def share_freed_memory() -> None:
    """Let every thread of this process use what another has freed; call it before there are any.

    pyarrow's own allocator keeps what one thread has allocated and another frees, as shards do: 38 MiB for 5
    in use after 4,000 shards. glibc gives each thread an arena of its own: what planning has freed is lost to
    the threads that read, and each of these comes to hold as much as the largest row groups take. It also
    learns to take ever larger blocks from the heap, where pages of changing sizes leave gaps: 10 MiB of them
    within 3,000 shards. An engine on a CPU chooses anew when it is loaded (engine/run/forward/memory.py).

    What the operator has set (ARROW_DEFAULT_MEMORY_POOL, MALLOC_ARENA_MAX, MALLOC_MMAP_THRESHOLD_) stays; a C
    library without mallopt is left alone. Source: mallopt(3).
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # read by pyarrow when it is loaded
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value, variable in (
        (_M_ARENA_MAX, 1, "MALLOC_ARENA_MAX"),
        (_M_MMAP_THRESHOLD, _MAPPED_BYTES, "MALLOC_MMAP_THRESHOLD_"),
    ):
        if variable not in os.environ:
            mallopt(parameter, value)
