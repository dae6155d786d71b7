"""Numpy arrays to a device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes: of any dtype, and what vectorised kernels like


def upload(arrays: list[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, in one transfer that the host does not wait for.

    A plain `.to(device)` copies from pageable memory and waits until all that was launched before is done.
    On a CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0] + [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    # torch keeps a pinned block until the copies that were queued from it are done
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
