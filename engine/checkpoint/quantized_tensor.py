"""A quantized weight that is unpacked when it is read, whole or the part that a rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint.weights import CheckpointTensor
from engine.errors import DamagedWeights

AT_ONCE = 1 << 20  # weights, whose temporaries stay in the processor's cache


class Codes(Protocol):
    """A matrix [out, in] of small numbers."""

    path: Path

    @property
    def shape(self) -> tuple[int, ...]: ...

    def part(self, *ranges: slice) -> Tensor:
        """These rows and columns, all of them where no range is given."""


class QuantizedTensor(CheckpointTensor):
    """A weight [out, in], (code - zero point) * scale, in float32 once it is read.

    block: rows and columns that share a scale, None for all of a dimension.
    scale: one for each block, as a matrix or, `transposed`, as that one's transpose.
    zero_points: as many, or one for all of them.
    group_of_column: [in], which of a row's scales is a column's; their order says where there is None.
    """

    def __init__(
        self,
        name: str,
        codes: Codes,
        block: tuple[int | None, int | None],
        scale: CheckpointTensor,
        *,
        transposed: bool = False,
        zero_points: Codes | int = 0,
        group_of_column: CheckpointTensor | None = None,
    ) -> None:
        self.name, self.path, self.dtype, self.shape = name, codes.path, "F32", codes.shape
        self._codes, self._scale, self._zero_points = codes, scale, zero_points
        self._transposed, self._group_of_column = transposed, group_of_column
        self._block = tuple(size or total for size, total in zip(block, self.shape, strict=True))
        self._num_scales = count_scales(self.shape, block)

    def whole(self) -> Tensor:
        """Unpack all of it, on the CPU. Raises DamagedWeights."""
        return self.part()

    def part(self, *ranges: slice) -> Tensor:
        """Unpack these rows and columns, on the CPU. Raises DamagedWeights."""
        scale, zero_points = self._read_scale(), self._read_zero_points()
        groups = [torch.arange(size) // block for size, block in zip(self.shape, self._block, strict=True)]
        if self._group_of_column is not None:
            groups[1] = self._read_group_of_column(self._group_of_column)
        for dim, part in enumerate(ranges):
            groups[dim] = groups[dim][part]
        codes = self._codes.part(*ranges).contiguous()
        unpacked = torch.empty(codes.shape, dtype=torch.float32)
        step = max(1, AT_ONCE // max(1, codes.shape[1]))
        for first in range(0, len(codes), step):
            some = unpacked[first : first + step]
            piece = codes[first : first + step]
            # by way of float16 it is exact, and several times faster than straight to float32
            some.copy_(piece.half() if piece.dtype == torch.float8_e4m3fn else piece)
            rows = groups[0][first : first + step]
            some -= zero_points if isinstance(zero_points, int) else _spread(zero_points, rows, groups[1])
            factor = _spread(scale, rows, groups[1])
            if not factor.all() and ((factor == 0) & (some != 0)).any():
                # Whoever quantized a weight that was not 0 has divided by its scale.
                raise _damaged(self._scale, "holds scales of 0 for weights that are not")
            some *= factor
            if not some.sum().isfinite() and not some.isfinite().all():  # the sum alone is faster
                raise _damaged(self, "has weights that are NaN or infinite")
        return unpacked

    def _read_scale(self) -> Tensor:
        scale = self._scale.whole().float()
        if not scale.isfinite().all():
            raise _damaged(self._scale, "holds scales that are NaN or infinite")
        if (scale < 0).any():
            raise _damaged(self._scale, "holds scales below 0")
        return scale.t() if self._transposed else scale.reshape(self._num_scales)

    def _read_zero_points(self) -> Tensor | int:
        stored = self._zero_points
        return stored if isinstance(stored, int) else stored.part().float().reshape(self._num_scales)

    def _read_group_of_column(self, tensor: CheckpointTensor) -> Tensor:
        groups = tensor.whole().long()
        if ((groups < 0) | (groups >= self._num_scales[1])).any():
            raise _damaged(tensor, f"names other groups than the {self._num_scales[1]} that have scales")
        return groups


def count_scales(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> tuple[int, ...]:
    """The scales of a weight [out, in] in each direction, where these (rows, columns) share one."""
    return tuple(-(-total // (size or total)) for size, total in zip(block, shape, strict=True))


def _spread(numbers: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """One number for each of the weights in these rows and columns, or for each row if all have the same."""
    chosen = numbers[rows]
    return chosen if numbers.shape[1] == 1 else chosen.index_select(1, columns)


def _damaged(tensor: CheckpointTensor, problem: str) -> DamagedWeights:
    return DamagedWeights(f"{tensor.name!r} in {tensor.path} {problem}; fetch the file again")
