"""RowWrites: what the host has to write of a decode batch's rows, and how it gets to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.upload import upload


@dataclass(frozen=True)
class RowMemory:
    """Where a decode batch's rows lie.

    wide: [columns, rows] int64, the next token first.  narrow: [columns, rows] int32.  Columns may have room
    behind their rows.  block_tables: [rows, blocks] int32, contiguous.  order: [rows] int32.
    """

    wide: Tensor
    narrow: Tensor
    block_tables: Tensor
    order: Tensor


@dataclass(frozen=True)
class RowWrites:
    """Values, and their places.

    rows: [written] int64.  wide: [columns, written] int64 and narrow: [columns, written] int32, of those.
    sampled_at: [written] int64, where the step before has sampled a row's next token; -1 where `wide` has it.
    table_places: [new] int64 and block_ids: [new] int32, entries of the block tables, which count as one row.
    order: [rows] int32, all of it; empty where it is as it was.
    """

    rows: NDArray[np.int64]
    wide: NDArray[np.int64]
    narrow: NDArray[np.int32]
    sampled_at: NDArray[np.int64]
    table_places: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    order: NDArray[np.int32]


def write_rows(memory: RowMemory, writes: RowWrites, sampled: Tensor | None) -> None:
    """Write what there is to write. sampled: [rows] int64, which `sampled_at` counts; it may lie in `memory`.

    In plain torch, the reference of `engine.kernels.row_writes`; on a GPU the host waits for it.
    """
    rows, wide, narrow, sampled_at, table_places, block_ids, order = upload(
        [
            writes.rows,
            writes.wide,
            writes.narrow,
            writes.sampled_at,
            writes.table_places,
            writes.block_ids,
            writes.order,
        ],
        memory.wide.device,
    )
    memory.block_tables.view(-1).index_copy_(0, table_places, block_ids)
    if len(order):
        memory.order.copy_(order)
    pending = sampled_at >= 0
    # before the rows are written that they may lie in
    tokens = None if sampled is None else sampled[sampled_at[pending]]
    memory.wide.index_copy_(1, rows, wide)
    memory.narrow.index_copy_(1, rows, narrow)
    if tokens is not None:
        memory.wide[0].index_copy_(0, rows[pending], tokens)
