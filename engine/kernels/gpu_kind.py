"""The kind of a GPU. Kernels choose their tiles and warps by it."""

from functools import lru_cache
from typing import NamedTuple

import torch


class GpuKind(NamedTuple):
    """A compute capability, as CUDA numbers it."""

    major: int
    minor: int

    @property
    def has_warp_groups(self) -> bool:
        """Whether four warps make products of matrices in shared memory together, as on Hopper."""
        return self.major == 9

    @property
    def has_tensor_memory(self) -> bool:
        """Whether products of matrices have a memory of their own, as on data-center Blackwell."""
        return self.major == 10


HOPPER = GpuKind(9, 0)
#: Stands for the GPU where tensors are on none: in Triton's interpreter, and for ops.bench.static.
assumed = HOPPER


def kind_of(device: torch.device) -> GpuKind:
    """Return the kind of a GPU; `assumed` for a device that is none."""
    return _kind_of(device) if device.type == "cuda" else assumed


@lru_cache(maxsize=64)
def _kind_of(device: torch.device) -> GpuKind:
    return GpuKind(*torch.cuda.get_device_capability(device))
