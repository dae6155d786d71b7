"""DecodeState: the rows of a decode batch on the device, and the host's writes to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.sampling_rows import SamplingRows

PADDING = -1  # the next position of a row that belongs to no sequence


@dataclass(frozen=True)
class DecodeState:
    """The rows that one decode step leaves to the next, and the inputs that the next makes of them.

    next_token_ids: [rows] int64, the token that each row computes next; -1 where none could be chosen.
    next_positions: [rows] int64, the place of that token in its sequence; PADDING in a row without a sequence.
    block_tables: [rows, blocks of the longest sequence] int32; what lies past a row's context is stale, and
    nothing reads it.
    sampling: each row's sampling values. A backend's `advance` writes their positions, and all fields below.
    token_ids, positions, slot_mapping: [rows] int64 and context_lens: [rows] int32, of the step that runs. A
    padding row has slot -1 and context length 0.
    """

    next_token_ids: Tensor
    next_positions: Tensor
    block_tables: Tensor
    sampling: SamplingRows
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor
    block_size: int

    def first(self, num_rows: int) -> DecodeState:
        """Return the first rows, in the same memory."""
        cut: dict[str, Any] = {
            name: tensor[:num_rows]
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor)
        }
        sampling = SamplingRows(*(tensor[:num_rows] for tensor in vars(self.sampling).values()))
        return replace(self, **cut, sampling=sampling)


class RowMemory(NamedTuple):
    """The tensors that hold a decode batch's rows.

    wide: [columns, rows] int64, the next token first.  narrow: [columns, rows] int32.  A column may
    have unused room behind its rows.  block_tables: [rows, blocks] int32, contiguous.  order: [rows] int32.
    """

    wide: Tensor
    narrow: Tensor
    block_tables: Tensor
    order: Tensor


class RowWrites(NamedTuple):
    """Values to write into a decode batch's rows, and their places.

    rows: [written] int64.  wide: [columns, written] int64 and narrow: [columns, written] int32, values of these rows.
    sampled_at: [written] int64, where the step before has sampled a row's next token; -1 where `wide` has it.
    table_places: [new] int64, places in the block tables, which are seen as one flat array.
    block_ids: [new] int32, what to write to these places.
    order: [rows] int32, the whole new order; empty if the order stays the same.
    """

    rows: NDArray[np.int64]
    wide: NDArray[np.int64]
    narrow: NDArray[np.int32]
    sampled_at: NDArray[np.int64]
    table_places: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    order: NDArray[np.int32]
