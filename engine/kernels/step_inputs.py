"""Makes a step's inputs on the device, from what the step before leaves there.

`advance_rows` makes all inputs of a recorded decode step. `fill_pending` fills in tokens that were not sampled yet when
the step's inputs were made on the host.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
TILE = 256  # pending tokens


@triton.jit(do_not_specialize=["num_rows"])
def advance_kernel(
    next_token_ids_ptr, next_positions_ptr, block_tables_ptr, token_ids_ptr, positions_ptr, slots_ptr,
    context_lens_ptr, sample_positions_ptr,
    num_rows, table_stride,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program makes the next step's inputs for ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    next_position = tl.load(next_positions_ptr + row, mask=inside, other=-1)
    is_real = next_position >= 0
    position = tl.maximum(next_position, 0)
    token_id = tl.load(next_token_ids_ptr + row, mask=is_real, other=0)
    block = tl.load(
        block_tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=is_real, other=0
    )
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids_ptr + row, tl.maximum(token_id, 0), mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(slots_ptr + row, tl.where(is_real, slot, -1), mask=inside)
    tl.store(context_lens_ptr + row, tl.where(is_real, position + 1, 0).to(tl.int32), mask=inside)
    tl.store(sample_positions_ptr + row, position + 1, mask=inside)
    tl.store(next_positions_ptr + row, next_position + 1, mask=is_real)


def advance_rows(
    next_token_ids: Tensor,
    next_positions: Tensor,
    block_tables: Tensor,
    outputs: Sequence[Tensor],
    *,
    block_size: int,
) -> None:
    """Make the next decode step's inputs for all rows in one launch.

    Shapes and dtypes are those of DecodeState. outputs: the tensors to write, in the kernel's order.
    """
    num_rows = len(next_positions)
    assert block_tables.stride(1) == 1
    advance_kernel[(triton.cdiv(num_rows, ROWS),)](
        next_token_ids, next_positions, block_tables, *outputs,
        num_rows, block_tables.stride(0), BLOCK_SIZE=block_size, ROWS=ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pending"], do_not_specialize_on_alignment=["sampled_ptr"])
def fill_pending_kernel(
    token_ids_ptr, rows_ptr, sampled_ptr, places_ptr, num_pending, TILE: tl.constexpr
):  # fmt: skip
    """One program fills TILE pending rows with their sampled tokens."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < num_pending
    row = tl.load(rows_ptr + at, mask=inside, other=0)
    place = tl.load(places_ptr + at, mask=inside, other=0)
    token = tl.load(sampled_ptr + place, mask=inside, other=0)
    tl.store(token_ids_ptr + row, tl.maximum(token, 0), mask=inside)


def fill_pending(token_ids: Tensor, rows: Tensor, sampled: Tensor, places: Tensor) -> None:
    """Fill pending rows in one launch; shapes and dtypes are those of KernelBackend.fill_pending."""
    fill_pending_kernel[(triton.cdiv(len(rows), TILE),)](
        token_ids, rows, sampled, places, len(rows), TILE=TILE
    )
