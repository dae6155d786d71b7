"""Linear layers of many experts in one launch, over rows that are sorted by expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import DOT_MIN, INTERPRETED, WIDEN


@triton.jit
def find_tile(ends_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile, its rows [ROWS] int64, and the row after the expert's last.

    Tiles of one expert follow each other, so that its weights are in the cache. Only the device knows how many rows
    an expert has: each program finds its tile. A surplus program gets expert EXPERTS, and no rows.
    """
    experts = tl.arange(0, EXPERTS_PAD)
    ends = tl.load(ends_ptr + experts, mask=experts < EXPERTS, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0)
    last_tiles = tl.cumsum((ends - starts + ROWS - 1) // ROWS, 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    is_one = expert < EXPERTS
    end = tl.load(ends_ptr + expert, mask=is_one, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=is_one & (expert > 0), other=0)
    num_after = tl.sum(tl.where(experts == expert, last_tiles, 0), 0) - tile
    num_tiles = (end - start + ROWS - 1) // ROWS
    row = (start + (num_tiles - num_after) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    return expert, row, end


@triton.jit
def grouped_product_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, ends_ptr, x_stride,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of one expert's rows, columns)."""
    expert, row, end = find_tile(ends_ptr, tl.program_id(0), EXPERTS, EXPERTS_PAD, ROWS)
    if expert < EXPERTS:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside_rows, inside_columns = row < end, column < OUT
        depth = tl.arange(0, DEPTH)
        x_places = x_ptr + row[:, None] * x_stride + depth[None, :]
        # a layer's experts may have more than 2^31 weights
        weight_ptr += expert.to(tl.int64) * OUT * IN
        weight_places = weight_ptr + column[None, :].to(tl.int64) * IN + depth[:, None]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for done in tl.range(0, IN, DEPTH):
            if IN % DEPTH == 0:
                x = tl.load(x_places + done, mask=inside_rows[:, None], other=0.0)
                weight = tl.load(weight_places + done, mask=inside_columns[None, :], other=0.0)
            else:
                inside = depth < IN - done
                x = tl.load(x_places + done, mask=inside_rows[:, None] & inside[None, :], other=0.0)
                weight = tl.load(
                    weight_places + done, mask=inside[:, None] & inside_columns[None, :], other=0.0
                )
            if WIDEN:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            acc = tl.dot(x, weight, acc, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * OUT + column, mask=inside_columns, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        places = out_ptr + row[:, None] * OUT + column[None, :]
        inside = inside_rows[:, None] & inside_columns[None, :]
        tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_product(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Multiply row r of x by its expert's transposed weight, and add its bias, without waiting.

    x: [rows, in], sorted by expert, contiguous in the last dimension.  weight: [experts, out, in] and bias:
    [experts, out], contiguous.  ends: [experts] int32, where each expert's rows end; those of expert e begin
    at ends[e - 1].  Returns [rows, out] in x's dtype, summed in float32.
    """
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    num_rows, (num_experts, out_features, in_features) = x.shape[0], weight.shape
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    rows, columns, depth, num_warps = choose_tile(-(-num_rows // num_experts), x.element_size())
    num_tiles = most_tiles(num_rows, num_experts, rows)
    if num_tiles:
        grouped_product_kernel[(num_tiles, triton.cdiv(out_features, columns))](
            out, x, weight, weight if bias is None else bias, ends, x.stride(0),
            EXPERTS=num_experts, EXPERTS_PAD=triton.next_power_of_2(num_experts),
            IN=in_features, OUT=out_features, HAS_BIAS=bias is not None,
            ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=num_warps, num_stages=3,
        )  # fmt: skip
    return out


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Return the most tiles that rows can take: each expert with rows may have one tile that is not full."""
    return num_rows // tile_rows + min(num_experts, num_rows)


def choose_tile(rows_per_expert: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return a program's rows, columns, depth and warps. Few rows get wide tiles of weights: memory is the limit."""
    few = rows_per_expert <= DOT_MIN
    if INTERPRETED:
        return DOT_MIN if few else 64, 64, 64, 4
    if itemsize == 4:
        return DOT_MIN if few else 64, 64, 16, 8
    return (DOT_MIN, 128, 128, 4) if few else (128, 128, 64, 8)
