"""Packs numpy arrays, aligned, so that one transfer takes all to a device."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Sequence[NDArray[Any]]

# Bytes: enough for any dtype and for vectorised kernels. Triton compiles a kernel anew for less aligned pointers.
ALIGNMENT = 16


def upload(arrays: Arrays, device: torch.device) -> list[Tensor]:
    """Upload arrays in one transfer without waiting; on a CPU the tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return upload_aligned(arrays, device)


def upload_aligned(arrays: Arrays, device: torch.device) -> list[Tensor]:
    """Upload arrays as `upload` does, each at a multiple of ALIGNMENT and always copied."""
    return unpack(upload_packed(arrays, device), arrays)


def upload_packed(arrays: Arrays, device: torch.device) -> Tensor:
    """Pack the arrays, and upload them in one transfer; the host does not wait."""
    # torch keeps a pinned block until the copies that were queued from it are done
    return pack(arrays, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def pack(arrays: Arrays, *, pin_memory: bool) -> Tensor:
    """Pack the arrays' bytes, each at a multiple of ALIGNMENT: [bytes] uint8 on the CPU."""
    places = starts(array.nbytes for array in arrays)
    packed = torch.empty(places[-1], dtype=torch.uint8, pin_memory=pin_memory)
    host = packed.numpy()
    for start, array in zip(places, arrays, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, arrays: Arrays) -> list[Tensor]:
    """Return views of the arrays in what `pack` returned. arrays: these, or others of their shapes and dtypes."""
    return [
        packed[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(starts(array.nbytes for array in arrays), arrays, strict=False)
    ]


def starts(sizes: Iterable[int]) -> list[int]:
    """Return where arrays of these sizes in bytes begin, one after another, and where the last one ends."""
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
