"""What is left of a GPU for the KV pool: measured, never estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Allocations are rounded up to segments of 2 MiB, and a driver keeps something for modules loaded later.
SPARE_BYTES = 64 * 2**20


class GpuMemory:
    """One device's memory as the driver and torch's allocator count it, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return torch.cuda.mem_get_info(self._device)[1]

    def used_bytes(self) -> int:
        """What is taken, by this process and by others, once torch has given back what it only keeps."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """What `run` makes torch reserve at most beyond what it has before: fragments count as taken."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


@dataclass(frozen=True)
class PoolRoom:
    """What is left for the pool, and what steps take at most beside it, in bytes."""

    pool_bytes: int
    step_bytes: int


def measure_room(
    memory: GpuMemory, share: float, warm_up: Callable[[], None], capture: Callable[[], object]
) -> PoolRoom:
    """What of `share` of the memory is left beside the largest step, the graphs, and all that is taken now.

    warm_up: runs the largest steps.  capture: records the graphs and returns what keeps them alive. Both
    take what they need of a pool from what has been allocated for them; it counts as taken here, so free it
    and add its size to the result.
    """
    step_bytes = memory.peak_bytes(warm_up)
    before = memory.used_bytes()
    graphs = capture()
    graph_bytes = memory.used_bytes() - before
    del graphs
    taken = memory.used_bytes() + step_bytes + graph_bytes + SPARE_BYTES
    return PoolRoom(int(memory.total_bytes * share) - taken, step_bytes)


def fits(memory: GpuMemory, share: float, room: PoolRoom) -> bool:
    """Whether the largest step still fits, now that pool and graphs are in place."""
    return memory.used_bytes() + room.step_bytes <= int(memory.total_bytes * share)
