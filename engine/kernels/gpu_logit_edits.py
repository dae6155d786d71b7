"""Edits of a step's logits in one transfer and one launch: see LogitEdits. A program edits one row."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.row_writes import of_packed
from engine.kernels.upload import starts, upload_packed

TILE = 2048  # logits, or entries of a kind, at once
#: Columns of a row's line in the table: what is pending, its mask, where each kind of entry begins and ends.
LAST, MASK, BANNED, BEHIND, BIASED, COUNTED = (tl.constexpr(i) for i in (0, 1, 2, 4, 6, 8))
COLUMNS = tl.constexpr(10)


@triton.jit
def as_float32(values):
    """Convert to float32; bfloat16 by its bits, as Triton's interpreter converts its smallest numbers wrongly."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def copy_allowed(
    out_row_ptr, row_ptr, masks_ptr, mask, num_words, COPIES: tl.constexpr, VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write minus infinity where the row's mask, if any, has a 0. With COPIES, copy the other logits in float32."""
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        allowed = ids < VOCAB
        if mask >= 0:
            word_at = masks_ptr + mask.to(tl.int64) * num_words + ids // 32
            word = tl.load(word_at, mask=ids // 32 < num_words, other=0)
            allowed = allowed & ((word >> (ids % 32)) & 1 != 0)
        never = tl.full([TILE], float("-inf"), tl.float32)
        if COPIES:
            logits = as_float32(tl.load(row_ptr + ids, mask=ids < VOCAB, other=0.0))
            tl.store(out_row_ptr + ids, tl.where(allowed, logits, never), mask=ids < VOCAB)
        else:
            tl.store(out_row_ptr + ids, never, mask=(ids < VOCAB) & (allowed == 0))


@triton.jit
def penalize(
    out_row_ptr, counted_ptr, penalties_ptr, start, end, last, TILE: tl.constexpr
):  # fmt: skip
    """Apply penalties. The pending token counts once more; if it has no entry, the entry of token -1 serves for it."""
    has_own = tl.zeros([], tl.int32)
    if last >= 0:
        for begin in range(start, end, TILE):
            at = begin + tl.arange(0, TILE)
            tokens = tl.load(counted_ptr + at.to(tl.int64) * 2, mask=at < end, other=-1)
            has_own += tl.sum((tokens == last).to(tl.int32), 0)
    presence = tl.load(penalties_ptr)
    frequency = tl.load(penalties_ptr + 1)
    repetition = tl.load(penalties_ptr + 2)
    for begin in range(start, end, TILE):
        at = begin + tl.arange(0, TILE)
        tokens = tl.load(counted_ptr + at.to(tl.int64) * 2, mask=at < end, other=-1)
        counts = tl.load(counted_ptr + at.to(tl.int64) * 2 + 1, mask=at < end, other=0)
        stands_for_last = (tokens < 0) & (at < end) & (last >= 0) & (has_own == 0)
        counts = tl.where(
            stands_for_last, 1, counts + ((tokens == last) & (tokens >= 0)).to(tl.int32)
        )
        tokens = tl.where(stands_for_last, last, tokens)
        logits = tl.load(out_row_ptr + tokens, mask=tokens >= 0, other=0.0).to(tl.float32)
        logits = tl.where(
            logits < 0, logits * repetition, tl.div_rn(logits, repetition + tl.zeros_like(logits))
        )
        logits = logits - frequency * counts.to(tl.float32) - presence * (counts > 0).to(tl.float32)
        tl.store(out_row_ptr + tokens, logits, mask=tokens >= 0)


@triton.jit(
    do_not_specialize=[
        "table_at", "penalties_at", "masks_at", "banned_at", "behind_at", "biased_at", "biases_at",
        "counted_at", "num_words",
    ],
    do_not_specialize_on_alignment=["sampled_ptr"],
)  # fmt: skip
def edit_kernel(
    out_ptr, logits_ptr, packed_ptr, sampled_ptr,
    table_at, penalties_at, masks_at, banned_at, behind_at, biased_at, biases_at, counted_at, num_words,
    row_stride, out_stride,
    ADDS: tl.constexpr, COPIES: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row). ADDS: numbers are added to some row. COPIES: the edited logits go to another tensor."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(of_packed(packed_ptr, 0, tl.int32) + row)
    row_ptr, out_row_ptr = logits_ptr + row * row_stride, out_ptr + row * out_stride
    mask = tl.full([], -1, tl.int32)
    line = of_packed(packed_ptr, table_at, tl.int32) + place * COLUMNS
    if place >= 0:
        mask = tl.load(line + MASK)
    if COPIES or mask >= 0:
        masks_ptr = of_packed(packed_ptr, masks_at, tl.int32)
        copy_allowed(out_row_ptr, row_ptr, masks_ptr, mask, num_words, COPIES, VOCAB, TILE)
    if place >= 0:
        tl.debug_barrier()
        never = tl.full([TILE], float("-inf"), tl.float32)
        last, last_at = tl.full([], -1, tl.int64), tl.load(line + LAST)
        if last_at >= 0:
            last = tl.load(sampled_ptr + last_at)
        last = last.to(tl.int32)
        banned_ptr, end = of_packed(packed_ptr, banned_at, tl.int64), tl.load(line + BANNED + 1)
        for begin in range(tl.load(line + BANNED), end, TILE):
            at = begin + tl.arange(0, TILE)
            tokens = tl.load(banned_ptr + at * 2 + 1, mask=at < end, other=0)
            tl.store(out_row_ptr + tokens, never, mask=at < end)
        behind_ptr, end = of_packed(packed_ptr, behind_at, tl.int64), tl.load(line + BEHIND + 1)
        for begin in range(tl.load(line + BEHIND), end, TILE):
            at = begin + tl.arange(0, TILE)
            before = tl.load(behind_ptr + at * 3 + 1, mask=at < end, other=-2)
            tokens = tl.load(behind_ptr + at * 3 + 2, mask=at < end, other=0)
            tl.store(out_row_ptr + tokens, never, mask=before == last)
        if ADDS:
            tl.debug_barrier()
            biased_ptr, end = of_packed(packed_ptr, biased_at, tl.int64), tl.load(line + BIASED + 1)
            for begin in range(tl.load(line + BIASED), end, TILE):
                at = begin + tl.arange(0, TILE)
                tokens = tl.load(biased_ptr + at * 2 + 1, mask=at < end, other=0)
                biases = tl.load(
                    of_packed(packed_ptr, biases_at, tl.float32) + at, mask=at < end, other=0.0
                )
                logits = tl.load(out_row_ptr + tokens, mask=at < end, other=0.0)
                tl.store(out_row_ptr + tokens, logits + biases, mask=at < end)
            tl.debug_barrier()
            penalize(
                out_row_ptr, of_packed(packed_ptr, counted_at, tl.int32),
                of_packed(packed_ptr, penalties_at, tl.float32) + place * 3,
                tl.load(line + COUNTED), tl.load(line + COUNTED + 1), last, TILE,
            )  # fmt: skip


def edit_logits(logits: Tensor, edits: Any, sampled: Tensor | None, *, tile: int = TILE) -> Tensor:
    """Return the edited logits, in float32 if numbers are added to any row.

    logits: [rows, vocabulary] of any floating dtype, which are changed.  edits: LogitEdits.
    sampled: [any] int64; the second column of edits.pending has indices into it.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert sampled is not None or not len(edits.pending)
    adds = len(edits.biased) > 0 or len(edits.counted) > 0
    copies = adds and logits.dtype != torch.float32
    out = logits
    if copies:
        out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    arrays, num_words = _arrays(num_rows, edits)
    packed = upload_packed(arrays, logits.device)
    if sampled is None:
        sampled = packed.view(torch.int64)  # the kernel takes a pointer, and does not read it
    edit_kernel[(num_rows,)](
        out, logits, packed, sampled,
        *starts(array.nbytes for array in arrays)[1:-1], num_words, logits.stride(0), out.stride(0),
        ADDS=adds, COPIES=copies, VOCAB=vocab_size, TILE=tile,
        num_warps=8, enable_fp_fusion=False,  # products and sums round by themselves, as in torch
    )  # fmt: skip
    return out


def _arrays(num_rows: int, edits: Any) -> tuple[list[NDArray[Any]], int]:
    """Return the kernel's arrays in the order of its arguments, and the number of words in a mask."""
    place_of_row = np.full(num_rows, -1, np.int32)
    place_of_row[edits.rows] = np.arange(len(edits.rows))
    table = np.zeros((len(edits.rows), COLUMNS.value), np.int32)
    table[:, (LAST.value, MASK.value)] = -1
    table[edits.pending[:, 0], LAST.value] = edits.pending[:, 1]
    table[edits.masked[:, 0], MASK.value] = edits.masked[:, 1]
    penalties = np.zeros((len(edits.rows), 3), np.float32)
    penalties[edits.penalized] = edits.penalties
    behind = edits.banned_behind
    for column, entries in ((BANNED, edits.banned), (BEHIND, behind), (BIASED, edits.biased)):
        bounds = np.searchsorted(entries[:, 0], np.arange(len(table) + 1))
        table[:, column.value] = bounds[:-1]
        table[:, column.value + 1] = bounds[1:]
    ends = np.cumsum(edits.num_counted)
    table[edits.penalized, COUNTED.value] = ends - edits.num_counted
    table[edits.penalized, COUNTED.value + 1] = ends
    arrays = [
        place_of_row,
        table,
        penalties,
        edits.token_masks,
        edits.banned,
        behind,
        edits.biased,
        edits.biases,
    ]
    arrays.append(edits.counted)
    return arrays, edits.token_masks.shape[1]
