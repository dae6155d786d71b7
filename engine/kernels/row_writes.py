"""Writes the host's changes to a decode batch's rows: one transfer, and one launch that scatters it."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.upload import starts, upload_packed

TILE = 512  # rows, or entries of block tables, at once


@triton.jit
def of_packed(packed_ptr, offset, dtype: tl.constexpr):
    """Return a pointer to the array that begins `offset` bytes in."""
    return (packed_ptr + offset).to(tl.pointer_type(dtype))


@triton.jit(
    do_not_specialize=[
        "rows_at", "wide_at", "narrow_at", "sampled_at", "places_at", "blocks_at", "order_at", "num_rows",
        "num_blocks", "num_ordered", "wide_pitch", "narrow_pitch",
    ],
    do_not_specialize_on_alignment=["sampled_ptr"],
)  # fmt: skip
def write_rows_kernel(
    packed_ptr, sampled_ptr, wide_ptr, narrow_ptr, tables_ptr, order_ptr,
    rows_at, wide_at, narrow_at, sampled_at, places_at, blocks_at, order_at,
    num_rows, num_blocks, num_ordered, wide_pitch, narrow_pitch,
    WIDE: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program 0 writes rows and order. Each other program writes TILE entries of the block tables."""
    program = tl.program_id(0)
    if program == 0:
        rows_ptr = of_packed(packed_ptr, rows_at, tl.int64)
        new_wide_ptr = of_packed(packed_ptr, wide_at, tl.int64)
        new_narrow_ptr = of_packed(packed_ptr, narrow_at, tl.int32)
        sampled_places_ptr = of_packed(packed_ptr, sampled_at, tl.int64)
        new_order_ptr = of_packed(packed_ptr, order_at, tl.int32)
        for start in range(0, num_rows, TILE):
            at = start + tl.arange(0, TILE)
            place = tl.load(sampled_places_ptr + at, mask=at < num_rows, other=-1)
            token = tl.load(sampled_ptr + place, mask=place >= 0, other=0)
            tl.store(new_wide_ptr + at, token, mask=place >= 0)
        # what was sampled may lie in rows that are written now
        tl.debug_barrier()
        for start in range(0, num_rows, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < num_rows
            row = tl.load(rows_ptr + at, mask=inside, other=0)
            for column in tl.static_range(WIDE):
                value = tl.load(new_wide_ptr + column * num_rows + at, mask=inside, other=0)
                tl.store(wide_ptr + column * wide_pitch + row, value, mask=inside)
            for column in tl.static_range(NARROW):
                value = tl.load(new_narrow_ptr + column * num_rows + at, mask=inside, other=0)
                tl.store(narrow_ptr + column * narrow_pitch + row, value, mask=inside)
        for start in range(0, num_ordered, TILE):
            at = start + tl.arange(0, TILE)
            value = tl.load(new_order_ptr + at, mask=at < num_ordered, other=0)
            tl.store(order_ptr + at, value, mask=at < num_ordered)
    else:
        at = (program - 1) * TILE + tl.arange(0, TILE)
        inside = at < num_blocks
        place = tl.load(of_packed(packed_ptr, places_at, tl.int64) + at, mask=inside, other=0)
        block = tl.load(of_packed(packed_ptr, blocks_at, tl.int32) + at, mask=inside, other=0)
        tl.store(tables_ptr + place, block, mask=inside)


def write_rows(
    memory: tuple[Tensor, Tensor, Tensor, Tensor],
    writes: Sequence[NDArray[Any]],
    sampled: Tensor | None,
) -> None:
    """Write rows in one launch. memory, writes: RowMemory and RowWrites of engine/attention/decode_state.py."""
    wide, narrow, block_tables, _ = memory
    new_rows, _, _, sampled_at, _, block_ids, new_order = writes
    assert block_tables.is_contiguous()
    assert wide.stride(1) == narrow.stride(1) == 1
    assert sampled is not None or (sampled_at < 0).all()
    if sampled is None:
        sampled = wide  # the kernel takes a pointer, and does not read it
    write_rows_kernel[(1 + triton.cdiv(len(block_ids), TILE),)](
        upload_packed(writes, wide.device), sampled, *memory,
        *starts(array.nbytes for array in writes)[:-1],
        len(new_rows), len(block_ids), len(new_order), wide.stride(0), narrow.stride(0),
        WIDE=len(wide), NARROW=len(narrow), TILE=TILE,
    )  # fmt: skip
