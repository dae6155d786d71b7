"""SamplingRows: the sampling parameters of each row of logits, as tensors on their device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.sampling_batch import SamplingBatch


@dataclass(frozen=True)
class SamplingRows:
    """A contiguous tensor for each parameter, with an entry for each row; names mean what SamplingParams' do.

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
    columns = [
        batch.position if each.name == "position" else batch.values[each.name]
        for each in fields(SamplingRows)
    ]
    # contiguous, where those of a row lay together: kernels read them so, on a CPU too
    columns = [np.ascontiguousarray(column) for column in columns]
    return [column.view(np.int64) if column.dtype == np.uint64 else column for column in columns]
