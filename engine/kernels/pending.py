"""Puts tokens of a step that still runs into the inputs of the next one."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 256


@triton.jit(do_not_specialize=["num_pending"], do_not_specialize_on_alignment=["sampled_ptr"])
def fill_pending_kernel(
    token_ids_ptr, rows_ptr, sampled_ptr, places_ptr, num_pending, TILE: tl.constexpr
):  # fmt: skip
    """One program fills TILE rows."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < num_pending
    row = tl.load(rows_ptr + at, mask=inside, other=0)
    place = tl.load(places_ptr + at, mask=inside, other=0)
    token = tl.load(sampled_ptr + place, mask=inside, other=0)
    tl.store(token_ids_ptr + row, tl.maximum(token, 0), mask=inside)


def fill_pending(token_ids: Tensor, rows: Tensor, sampled: Tensor, places: Tensor) -> None:
    """Fill pending rows in one launch; shapes and dtypes are those of KernelBackend.fill_pending."""
    fill_pending_kernel[(triton.cdiv(len(rows), TILE),)](token_ids, rows, sampled, places, len(rows), TILE=TILE)
