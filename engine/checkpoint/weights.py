"""One tensor of a checkpoint, on disk until it is read."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class CheckpointTensor:
    """A tensor of an open safetensors file; `shape` is known before anything is read."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._slice = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())

    def whole(self) -> Tensor:
        """Read all of it, on the CPU."""
        tensor: Tensor = self._file.get_tensor(self._name)
        return tensor

    def read(self, dim: int, start: int, length: int) -> Tensor:
        """Read `length` entries of dimension `dim` (0 or 1) from `start`, on the CPU."""
        if length == self.shape[dim]:
            return self.whole()
        part = slice(start, start + length)
        tensor: Tensor = self._slice[part] if dim == 0 else self._slice[:, part]
        return tensor

    def part(self, *ranges: slice) -> Tensor:
        """Read these ranges of the first dimensions, and all of the others, on the CPU."""
        tensor: Tensor = self._slice[ranges]
        return tensor
