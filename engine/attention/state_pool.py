"""The pool of states: what convolutions and recurrences keep of a sequence, whatever its length."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """Return the bytes of one row of these states."""
    return sum(math.prod(state.shape) * state.dtype.itemsize for state in states)


@dataclass(frozen=True)
class StatePart:
    """Tokens of one sequence, in rows start to end of the batch, between two states in the pool.

    source: the row of the state before the tokens, -1 if there is none. target: the row that gets the state after them.
    saved: another row that gets it too, -1 for none.
    """

    start: int
    end: int
    source: int
    target: int
    saved: int


@dataclass(frozen=True)
class StateParts:
    """A step's rows, cut where states are read and written.

    decodes: [decodes] int64. The batch's first rows are decodes, a token each: these are their rows in the pool.
    others: the parts behind the decodes, in an order in which they may be computed one after the other.
    table: [parts, 5] int64, the fields of StatePart of all parts, those of the decodes first.
    waves: ranges of the table. They are computed one after the other. No part reads or writes a row of the pool that
    another part of its wave writes. The first wave begins with the decodes.
    """

    decodes: Tensor
    others: Sequence[StatePart]
    table: Tensor
    waves: Sequence[range]


Mix = Callable[[Tensor, StateParts], Tensor]


class StateBreak(ABC):
    """Takes the place of StateParts while a step is recorded without its states, which `mix` then advances."""

    @abstractmethod
    def mix(self, x: Tensor, width: int, compute: Mix) -> Tensor:
        """Return what compute(x, parts) gives, [tokens, width]. x: [tokens, any]."""


def state_parts(parts: NDArray[Any], device: torch.device) -> StateParts:
    """Sort a step's parts by wave, and upload them. parts: StepBatch.state_parts."""
    num_decodes = _count_decodes(parts)
    waves = find_waves(parts)
    order = np.argsort(waves, kind="stable")
    parts = parts[order]
    ends = np.searchsorted(waves[order], np.arange(waves.max(initial=-1) + 1), side="right")
    ranges = [range(first, end) for first, end in pairwise([0, *ends.tolist()])]
    decode_targets = np.ascontiguousarray(parts[:num_decodes, 3])
    decodes, table = upload([decode_targets, parts], device)
    others = [StatePart(*part) for part in parts[num_decodes:].tolist()]
    return StateParts(decodes, others, table, ranges)


def _count_decodes(parts: NDArray[Any]) -> int:
    """Return how many of the first parts are decodes: one token of a sequence whose state stays in its row."""
    starts, ends, sources, targets, saved = parts.T
    not_decodes = ((ends - starts != 1) | (sources != targets) | (saved >= 0)).nonzero()[0]
    return int(not_decodes[0]) if len(not_decodes) else len(parts)


def find_waves(parts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the wave of each part, [parts]: 0, or one behind the last wave that it has to wait for.

    parts: StepBatch.state_parts. A part waits for earlier parts that write a row which it reads or writes, and for
    those that read a row which it writes.
    """
    num_decodes = _count_decodes(parts)
    waves = np.zeros(len(parts), np.int64)
    decode_rows = parts[:num_decodes, 3].tolist()
    next_read = dict.fromkeys(decode_rows, 1)  # by row, the first wave in which it may be read
    next_write = dict.fromkeys(decode_rows, 1)
    for place, (_, _, source, *targets) in enumerate(parts[num_decodes:].tolist(), num_decodes):
        written = [row for row in targets if row >= 0]
        wave = max([next_read.get(source, 0), *(next_write.get(row, 0) for row in written)])
        waves[place] = wave
        if source >= 0:
            next_write[source] = max(next_write.get(source, 0), wave + 1)
        for row in written:
            next_read[row] = next_write[row] = wave + 1
    return waves


class StateTable:
    """The parts of a decode step that graphs replay. Row r of the batch has row r of the table.

    A padding row begins at no state, and writes none.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        rows = np.arange(num_rows)
        none = np.full(num_rows, -1)
        # the fields of StatePart: start, end, source, target, saved
        self._padding: NDArray[np.int64] = np.stack((rows, rows + 1, none, none, none), axis=1)
        self._table = torch.from_numpy(self._padding).to(device, copy=True)

    def first(self, num_rows: int) -> StateParts:
        """Return the parts of the first rows, as views of the table."""
        table = self._table[:num_rows]
        targets = table[:, 3]
        return StateParts(targets, (), table, [range(num_rows)])

    def write(self, parts: NDArray[Any], rows: NDArray[np.int64]) -> None:
        """Replace the table by a step's parts.

        parts: StepBatch.state_parts, of one token each. rows: each part's row of the batch, [parts].
        """
        table = self._padding.copy()
        table[rows, 2:] = parts[:, 2:]
        (written,) = upload([table], self._table.device)
        self._table.copy_(written)


def zeros(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, since stale NaN would spoil masked scores.

    On a CPU they are made by numpy, whose zeros take memory only when they are written to.
    """
    if not length or device.type != "cpu":
        return torch.zeros(length * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
    return torch.from_numpy(np.zeros(length * dtype.itemsize, np.uint8)).view(dtype)
