"""The one object that knows how many ranks share the model, handed to every layer that is split."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """This rank and the number of ranks. Only one rank is built so far, so sums and gathers are no work."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1 or self.rank != 0:
            raise ConfigError(
                f"rank {self.rank} of {self.size}: tensor parallel is not built yet; use one rank"
            )

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total`. Raises ConfigError if the ranks cannot share it evenly."""
        if total % self.size:
            raise ConfigError(
                f"{total} {what} cannot be shared by {self.size} ranks; change tensor_parallel_size"
            )
        return total // self.size

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice of a full tensor along `dim`."""
        length = self.share(tensor.shape[dim], f"entries of dimension {dim}")
        return tensor.narrow(dim, self.rank * length, length)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of all ranks' partial results, on every rank."""
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' parts side by side in the last dimension, on every rank."""
        return part
