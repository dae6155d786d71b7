"""TensorParallel and Share: the ranks of a model, and one rank's part of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.checkpoint.weights import CheckpointTensor
from engine.errors import ConfigError, WeightMismatch


@dataclass(frozen=True)
class Share:
    """One rank's part of a dimension of `total` entries: `length` of them from `start`."""

    start: int
    length: int
    total: int

    def times(self, factor: int) -> Share:
        """Return the same part in rows, where each entry has `factor` rows, as a head has head_dim rows."""
        return Share(self.start * factor, self.length * factor, self.total * factor)

    def read(self, tensor: CheckpointTensor, dim: int) -> Tensor:
        """Read this part of a checkpoint's tensor, and no more. Raises WeightMismatch for another size."""
        if dim >= len(tensor.shape) or tensor.shape[dim] != self.total:
            raise WeightMismatch(
                f"shape {list(tensor.shape)} found, {self.total} entries in dimension {dim} expected"
            )
        return tensor.read(dim, self.start, self.length)


@dataclass(frozen=True)
class TensorParallel:
    """This rank and the number of ranks. In this class the rank is alone: sums and gathers have nothing to do.

    The split is Megatron-LM's, arXiv:1909.08053, section 3: a layer split by columns is followed by one split by
    rows, and the ranks sum once for each such pair.
    """

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> Share:
        """Return this rank's part of `total`. Raises ConfigError if the ranks cannot share it evenly."""
        if total % self.size:
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {total} {what} cannot be shared by {self.size} ranks; "
                "choose a divisor"
            )
        length = total // self.size
        return Share(self.rank * length, length, total)

    def share_or_copy(self, total: int, what: str) -> Share:
        """Return this rank's part; if there are fewer entries than ranks, several ranks hold the same one."""
        if total >= self.size:
            return self.share(total, what)
        if self.size % total:
            raise ConfigError(
                f"tensor_parallel_size={self.size}: {total} {what} cannot be held by {self.size} ranks, each "
                "by equally many; choose a multiple"
            )
        return Share(self.rank * total // self.size, 1, total)

    def share_padded(self, total: int) -> Share:
        """Return this rank's part; the last ranks may have less than `padded_length`."""
        start = min(total, self.rank * self.padded_length(total))
        return Share(start, min(self.padded_length(total), total - start), total)

    def padded_length(self, total: int) -> int:
        """Return the entries each rank makes room for when `total` are shared with padding."""
        return -(-total // self.size)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum all ranks' partial results, on every rank. `partial` may be overwritten."""
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """Put all ranks' parts side by side in the last dimension on rank 0; the others keep their part."""
        return part

    def broadcast(self, values: Tensor) -> Tensor:
        """Copy rank 0's values over the others', which must be of the same size."""
        return values

    def minimum(self, value: int) -> int:
        """Return the smallest of all ranks' values, on every rank."""
        return value
