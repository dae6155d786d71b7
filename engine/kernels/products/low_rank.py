"""What LoRA adapters add to a linear layer, for the rows of all adapters in two launches: y += scale * (x A^T) B^T.

Rows are sorted by adapter. The table of a layer says where each loaded adapter has its matrices, so adapters may be
loaded and dropped while a CUDA graph that reads the table stays. Source: Punica, arXiv:2310.18547.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.adapter_tables import (
    BLOCK_FIELDS,
    HEAD_FIELDS,
    MOST_RANKS,
    LayerTable,
    SortedRows,
)
from engine.kernels.attention.kv_tile import DOT_MIN, WIDEN
from engine.kernels.products.grouped_product import find_tile, most_tiles

#: Ranks that a program computes. Adapters mostly have 8 to 64.
RANKS = DOT_MIN
COLUMNS = 64
DEPTH = 64
#: A step of up to this many rows has too few tiles of rows to fill a GPU, so the columns of x are split too.
FEW_ROWS = 1024
MOST_SPLITS = 8


@triton.jit(do_not_specialize=["num_rows"])
def narrow_kernel(
    narrow_ptr, x_ptr, rows_ptr, ends_ptr, table_ptr, num_rows, x_stride,
    ADAPTERS: tl.constexpr, ADAPTERS_PAD: tl.constexpr, FIELDS: tl.constexpr, IN: tl.constexpr,
    MOST_RANKS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of one adapter's rows, tile of ranks, split of x's columns): narrow = x A^T, a sum for each split.

    narrow: [splits, rows, MOST_RANKS] float32, its rows in the sorted order. Ranks that an adapter lacks are neither
    written here nor read by `widen_kernel`.
    """
    adapter, place, end = find_tile(ends_ptr, tl.program_id(0), ADAPTERS, ADAPTERS_PAD, ROWS)
    first_rank = tl.program_id(1) * RANKS
    split = tl.program_id(2)
    if adapter < ADAPTERS:
        fields = table_ptr + adapter * FIELDS
        num_ranks = tl.load(fields + 1)
        if first_rank < num_ranks:
            a_ptr = tl.load(fields).to(tl.pointer_type(x_ptr.dtype.element_ty))
            inside_rows = place < end
            row = tl.load(rows_ptr + place, mask=inside_rows, other=0)
            rank = first_rank + tl.arange(0, RANKS)
            inside_ranks = rank < num_ranks
            depth = tl.arange(0, DEPTH)
            PART: tl.constexpr = (IN + SPLITS * DEPTH - 1) // (SPLITS * DEPTH) * DEPTH
            acc = tl.zeros([ROWS, RANKS], tl.float32)
            for done in tl.range(0, PART, DEPTH):
                column = split * PART + done + depth
                inside = column < IN
                x = tl.load(
                    x_ptr + row[:, None] * x_stride + column[None, :],
                    mask=inside_rows[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                a = tl.load(
                    a_ptr + rank[:, None] * IN + column[None, :],
                    mask=inside_ranks[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                if WIDEN:
                    x, a = x.to(tl.float32), a.to(tl.float32)
                acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
            places = narrow_ptr + (split * num_rows + place[:, None]) * MOST_RANKS + rank[None, :]
            tl.store(places, acc, mask=inside_rows[:, None] & inside_ranks[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def widen_kernel(
    y_ptr, narrow_ptr, rows_ptr, ends_ptr, table_ptr, scales_ptr, num_rows, y_stride,
    ADAPTERS: tl.constexpr, ADAPTERS_PAD: tl.constexpr, BLOCKS: tl.constexpr,
    HEAD_FIELDS: tl.constexpr, BLOCK_FIELDS: tl.constexpr, MOST_RANKS: tl.constexpr,
    SPLITS: tl.constexpr, COLUMN_TILES: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile of one adapter's rows, tile of a block's columns): y += scale * narrow B^T."""
    adapter, place, end = find_tile(ends_ptr, tl.program_id(0), ADAPTERS, ADAPTERS_PAD, ROWS)
    block = tl.program_id(1) // COLUMN_TILES
    column = tl.program_id(1) % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    if adapter < ADAPTERS:
        FIELDS: tl.constexpr = HEAD_FIELDS + BLOCK_FIELDS * BLOCKS
        fields = table_ptr + adapter * FIELDS + HEAD_FIELDS + BLOCK_FIELDS * block
        start, num_columns = tl.load(fields + 1), tl.load(fields + 2)
        if tl.program_id(1) % COLUMN_TILES * COLUMNS < num_columns:
            dtype: tl.constexpr = y_ptr.dtype.element_ty
            b_ptr = tl.load(fields).to(tl.pointer_type(dtype))
            first_rank, num_ranks = tl.load(fields + 3), tl.load(fields + 4)
            scale = tl.load(scales_ptr + adapter * BLOCKS + block)
            inside_rows, inside_columns = place < end, column < num_columns
            row = tl.load(rows_ptr + place, mask=inside_rows, other=0)
            rank = tl.arange(0, RANKS)
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for done in tl.range(0, num_ranks, RANKS):
                inside_ranks = done + rank < num_ranks
                inside = inside_rows[:, None] & inside_ranks[None, :]
                narrow_places = place[:, None] * MOST_RANKS + first_rank + done + rank[None, :]
                narrow = tl.zeros([ROWS, RANKS], tl.float32)
                for split in tl.range(0, SPLITS):
                    of_split = narrow_ptr + split * num_rows * MOST_RANKS
                    narrow += tl.load(of_split + narrow_places, mask=inside, other=0.0)
                b = tl.load(
                    b_ptr + column[:, None] * num_ranks + done + rank[None, :],
                    mask=inside_columns[:, None] & inside_ranks[None, :], other=0.0,
                )  # fmt: skip
                narrow = narrow.to(dtype)  # rounded, as a separate product x A^T would be
                if WIDEN:
                    narrow, b = narrow.to(tl.float32), b.to(tl.float32)
                acc = tl.dot(narrow, tl.trans(b), acc, input_precision="ieee")
            places = y_ptr + row[:, None] * y_stride + start + column[None, :]
            inside = inside_rows[:, None] & inside_columns[None, :]
            y = tl.load(places, mask=inside, other=0.0).to(tl.float32)
            tl.store(places, (y + scale * acc).to(dtype), mask=inside)


def add_low_rank(y: Tensor, x: Tensor, sorted_rows: SortedRows, table: LayerTable) -> None:
    """Add what each row's adapter adds to a layer's output, in place.

    x: [rows, in], y: [rows, out], contiguous in the last dimension. The adapters' matrices are contiguous. All have one
    dtype.
    """
    assert x.stride(1) == 1
    assert y.stride(1) == 1
    num_rows, in_features = x.shape
    num_adapters, num_blocks = table.scales.shape
    rows, splits = choose_tile(num_rows, in_features)
    num_tiles = most_tiles(num_rows, num_adapters, rows)
    if not num_tiles:
        return
    narrow = torch.empty((splits, num_rows, MOST_RANKS), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(num_adapters)
    narrow_kernel[(num_tiles, MOST_RANKS // RANKS, splits)](
        narrow, x, sorted_rows.rows, sorted_rows.ends, table.addresses, num_rows, x.stride(0),
        ADAPTERS=num_adapters, ADAPTERS_PAD=padded, FIELDS=table.addresses.shape[1], IN=in_features,
        MOST_RANKS=MOST_RANKS, SPLITS=splits, ROWS=rows, RANKS=RANKS, DEPTH=DEPTH,
        num_warps=4,
    )  # fmt: skip
    column_tiles = triton.cdiv(table.most_rows, COLUMNS)
    widen_kernel[(num_tiles, num_blocks * column_tiles)](
        y, narrow, sorted_rows.rows, sorted_rows.ends, table.addresses, table.scales, num_rows,
        y.stride(0), ADAPTERS=num_adapters, ADAPTERS_PAD=padded, BLOCKS=num_blocks,
        HEAD_FIELDS=HEAD_FIELDS, BLOCK_FIELDS=BLOCK_FIELDS, MOST_RANKS=MOST_RANKS,
        SPLITS=splits, COLUMN_TILES=column_tiles, ROWS=rows, RANKS=RANKS, COLUMNS=COLUMNS,
        num_warps=4 if rows == DOT_MIN else 8,
    )  # fmt: skip


def choose_tile(num_rows: int, in_features: int) -> tuple[int, int]:
    """Return how many rows a tile has, and into how many parts x's columns are cut."""
    if num_rows > FEW_ROWS:
        return 64, 1
    return DOT_MIN, min(MOST_SPLITS, triton.cdiv(in_features, DEPTH))
