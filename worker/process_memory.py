"""How a worker's process allocates memory."""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8
"""A parameter of glibc's mallopt (malloc.h)."""


def share_freed_memory() -> None:
    """Let every thread of this process use what another has freed; call it before there are any.

    pyarrow's own allocator keeps what one thread has allocated and another frees, as shards do: 38 MiB for 5
    in use after 4,000 shards. glibc gives each thread an arena of its own: what planning has freed is lost to
    the threads that read, and each of these comes to hold as much as the largest row groups take. What the
    operator has set (ARROW_DEFAULT_MEMORY_POOL, MALLOC_ARENA_MAX) stays; a C library without mallopt has no
    such arenas. Source: mallopt(3).
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # read by pyarrow when it is loaded
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)
