"""The pool of states: what convolutions and recurrences keep of a sequence, whatever its length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.upload import upload


class StateShape(NamedTuple):
    """One state of a layer, for one sequence. name, place: as transformers' cache layers have them."""

    layer: int
    name: str
    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class StatePool:
    """Rows of states, one for each sequence that runs, then the snapshots.

    layers: the states of each layer, with tensors [rows, *shape].
    """

    def __init__(self, states: Sequence[StateShape], num_rows: int, device: torch.device) -> None:
        self.layers: dict[int, list[tuple[StateShape, Tensor]]] = {}
        for state in states:
            tensor = zeros(num_rows * math.prod(state.shape), state.dtype, device).view(
                num_rows, *state.shape
            )
            self.layers.setdefault(state.layer, []).append((state, tensor))
        self._tensors = [tensor for layer in self.layers.values() for _, tensor in layer]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all rows."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def read(self, rows: Tensor) -> list[Tensor]:
        """Copy rows, [rows] int64, of all states."""
        return [tensor.index_select(0, rows) for tensor in self._tensors]

    def write(self, rows: Tensor, values: Sequence[Tensor]) -> None:
        """Put back what `read` returned."""
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.index_copy_(0, rows, value)


def state_bytes(states: Sequence[StateShape]) -> int:
    """Return the bytes of one row."""
    return sum(math.prod(state.shape) * state.dtype.itemsize for state in states)


@dataclass(frozen=True)
class StatePart:
    """Tokens of one sequence, in rows start to end of the batch, between two states in the pool.

    source: the row of the state before them, -1 if none is. target, saved: rows that get the state behind them, the
    latter -1 for none.
    """

    start: int
    end: int
    source: int
    target: int
    saved: int


@dataclass(frozen=True)
class StateParts:
    """A step's rows, cut where states are read and written; the parts are computed in this order.

    decodes: [decodes] int64, the pool's row of each of the batch's first rows, a token each.
    table: [parts, 5] int64, the fields of StatePart of all parts, those of the decodes first.
    """

    decodes: Tensor
    others: Sequence[StatePart]
    table: Tensor


def state_parts(parts: NDArray[Any], device: torch.device) -> StateParts:
    """Read StepBatch.state_parts."""
    starts, ends, sources, targets, saved = parts.T
    others = ((ends - starts != 1) | (sources != targets) | (saved >= 0)).nonzero()[0]
    num_decodes = int(others[0]) if len(others) else len(parts)
    decodes, table = upload([np.ascontiguousarray(targets[:num_decodes]), parts], device)
    return StateParts(decodes, [StatePart(*part) for part in parts[num_decodes:].tolist()], table)


def zeros(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, since stale NaN would spoil masked scores; on a CPU numpy's, which take memory when written."""
    if not length or device.type != "cpu":
        return torch.zeros(length * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
    return torch.from_numpy(np.zeros(length * dtype.itemsize, np.uint8)).view(dtype)
