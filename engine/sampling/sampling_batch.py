"""SamplingBatch: the sampler's inputs besides logits, as arrays; SamplingRows: as tensors on the logits' device.

One structured array holds a row's values: the columns of SamplingParams, and what a sequence has of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampling_params import COLUMNS, SamplingParams

Values = NDArray[np.void]

#: A row: a value for each of COLUMNS, then `seed` and `sample_index`, uint64.
ROW = np.dtype([*COLUMNS.items(), ("seed", "uint64"), ("sample_index", "uint64")], align=True)
SEED_MASK = 2**64 - 1

_of_params = attrgetter(*COLUMNS)


def sampling_row(params: SamplingParams, seed: int, sample_index: int) -> tuple[float | int, ...]:
    """Return a row of dtype ROW as a tuple. seed: of any sign."""
    return (*_of_params(params), seed & SEED_MASK, sample_index)


def neutral_rows(num_rows: int) -> Values:
    """Return [num_rows] of dtype ROW with the defaults of SamplingParams, which change nothing."""
    rows: Values = np.empty(num_rows, ROW)
    rows[:] = sampling_row(SamplingParams(), 0, 0)
    return rows


@dataclass(frozen=True)
class SamplingBatch:
    """The choice of one token for each row of a step's logits, as numpy arrays.

    values: [samples] of dtype ROW.  position: [samples] uint64, the tokens before.
    edits: of the logits, if any.  fill_masks: computes those of their masks that are zeros yet, while the step runs.
    """

    values: Values
    position: NDArray[np.uint64]
    edits: LogitEdits | None = None
    fill_masks: Callable[[], None] | None = None

    def ready_edits(self) -> LogitEdits | None:
        """Compute the masks, as late as can be, and return the edits."""
        if self.fill_masks is not None:
            self.fill_masks()
        return self.edits


@dataclass(frozen=True)
class SamplingRows:
    """One entry of each for a row, contiguous; fields have the meaning of SamplingParams'.

    temperature, top_p, min_p: [rows] float32.  top_k: [rows] int32, 0 or less is off.
    seed: [rows] int64, the bits of the unsigned one.  sample_index, position: [rows] int64, the counter of the row's
    uniform; position counts all tokens before the chosen one.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor
    sample_index: Tensor
    position: Tensor

    def only(self, places: Tensor) -> SamplingRows:
        """Return some of the rows. places: [some] int64, on their device."""
        return SamplingRows(*(getattr(self, each.name)[places] for each in fields(self)))


def sampling_columns(batch: SamplingBatch) -> list[NDArray[Any]]:
    """Return the fields of SamplingRows on the host, in their order."""
    columns = [batch.position if each.name == "position" else batch.values[each.name] for each in fields(SamplingRows)]
    # one after another in memory, where a row's values were: kernels read them so, on a CPU too
    columns = [np.ascontiguousarray(column) for column in columns]
    return [column.view(np.int64) if column.dtype == np.uint64 else column for column in columns]
