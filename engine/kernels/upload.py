"""Numpy arrays to a device without waiting for it."""

from __future__ import annotations

from itertools import accumulate

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
    # torch keeps a pinned block until the copies that were queued from it are done
    packed = pack(arrays, pin_memory=True)
    return unpack(packed.to(device, non_blocking=True), arrays)


def pack(arrays: list[NDArray[np.generic]], *, pin_memory: bool) -> Tensor:
    """The arrays' bytes one after another, each at a multiple of ALIGNMENT: [bytes] uint8 on the CPU."""
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin_memory)
    host = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, arrays: list[NDArray[np.generic]]) -> list[Tensor]:
    """Views of what `pack` made of these arrays, wherever it is now."""
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(_starts(arrays), arrays, strict=False)
    ]


def _starts(arrays: list[NDArray[np.generic]]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    return [0, *accumulate(sizes)]
