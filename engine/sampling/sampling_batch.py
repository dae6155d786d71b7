"""SamplingBatch: the sampler's inputs besides logits, as arrays; `values` has SamplingParams' columns.

One structured array holds a row's values: the columns of SamplingParams, and the sequence's seed and sample index.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """What the sampler needs to choose one token for each row of a step's logits, as numpy arrays.

    values: [samples] of dtype ROW.  position: [samples] uint64, how many tokens stand before the chosen one.
    edits: of the logits, if any.  fill_masks: computes the masks that are still zeros, while the step runs.
    """

    values: Values
    position: NDArray[np.uint64]
    edits: LogitEdits | None = None
    fill_masks: Callable[[], None] | None = None

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the fields of SamplingRows, on the host, each contiguous as kernels read it."""
        columns: dict[str, NDArray[Any]] = {"position": self.position.view(np.int64)}
        for name in ROW.names or ():
            column = np.ascontiguousarray(self.values[name])
            columns[name] = column.view(np.int64) if column.dtype == np.uint64 else column
        return columns

    def ready_edits(self) -> LogitEdits | None:
        """Compute the missing masks and return the edits; called as late as possible, while the step runs."""
        if self.fill_masks is not None:
            self.fill_masks()
        return self.edits
