"""SamplingRows: the sampling parameters of each row of logits, as tensors on their device."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True)
class SamplingRows:
    """A contiguous tensor for each parameter, with an entry for each row. The parameters are those of SamplingParams.

    temperature, top_p, min_p: [rows] float32.  top_k: [rows] int32, 0 or less is off.
    seed: [rows] int64, with the bits of an unsigned seed.
    sample_index, position: [rows] int64, the counter of the row's uniform; position counts all tokens before the chosen
    one.
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
        return SamplingRows(*(getattr(self, column.name)[places] for column in fields(self)))
