"""Linear layers of many experts with weights in 4 or 8 bits, in one launch, over rows that are sorted by expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.products.grouped_product import find_tile, most_tiles
from engine.kernels.products.packed_product import (
    choose_tile,
    code_numbers,
    multiply_packed,
    widest_block,
)


@triton.jit
def grouped_packed_product_kernel(
    out_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, ends_ptr, x_stride,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    GROUP: tl.constexpr, NUM_WORDS: tl.constexpr, NUM_ZEROS: tl.constexpr, KIND: tl.constexpr,
    TABLE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of one expert's rows, columns). NUM_WORDS, NUM_ZEROS: of one expert."""
    expert, row, end = find_tile(ends_ptr, tl.program_id(0), EXPERTS, EXPERTS_PAD, ROWS)
    if expert < EXPERTS:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside_rows, inside_columns = row < end, column < OUT
        expert64 = expert.to(tl.int64)
        acc = multiply_packed(
            x_ptr, words_ptr + expert64 * NUM_WORDS, scales_ptr + expert64 * (IN // GROUP * OUT),
            zeros_ptr + expert64 * NUM_ZEROS, row, inside_rows, column, inside_columns, x_stride,
            IN, OUT, GROUP, KIND, TABLE, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * OUT + column, mask=inside_columns, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        places = out_ptr + row[:, None] * OUT + column[None, :]
        inside = inside_rows[:, None] & inside_columns[None, :]
        tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_packed_product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    out_features: int,
    block: int,
    kind: str,
) -> Tensor:
    """Multiply row r of x by its expert's transposed weight, and add its bias, without waiting.

    x: [rows, in], sorted by expert.  words, scales, zeros: of all experts, each laid out by `lay_out` of
    packed_product.  bias: [experts, out].  ends: [experts] int32, where each expert's rows end.
    Returns [rows, out] in x's dtype, summed in float32.
    """
    assert x.stride(1) == 1
    num_rows, in_features = x.shape
    num_experts, num_groups, _ = scales.shape
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    group = in_features // num_groups
    block = widest_block(x, group, block, kind)
    rows_per_expert = -(-num_rows // num_experts)
    rows, columns, depth, num_warps = choose_tile(rows_per_expert, block, x.element_size())
    num_tiles = most_tiles(num_rows, num_experts, rows)
    if num_tiles:
        grouped_packed_product_kernel[(num_tiles, triton.cdiv(out_features, columns))](
            out, x, words, scales, zeros, out if bias is None else bias, ends, x.stride(0),
            EXPERTS=num_experts, EXPERTS_PAD=triton.next_power_of_2(num_experts), IN=in_features,
            OUT=out_features, GROUP=group, NUM_WORDS=words[0].numel(),
            NUM_ZEROS=zeros[0].numel(), KIND=kind, TABLE=code_numbers(kind, x.dtype),
            HAS_BIAS=bias is not None, ROWS=rows, COLUMNS=columns, DEPTH=depth,
            num_warps=num_warps, num_stages=3,
        )  # fmt: skip
    return out
