"""Linear layers of steps of few rows, in one launch with the norm before, the gate, or the addition after them.

The norm before a product is a scale of its rows: norm(x) W^T is x (w * W)^T, each row divided by the root of
its mean square. So the norm's weight w is folded into W when the model is loaded, and the squares of a row
are summed by the product that wrote it, one sum for each program. All in float32, rounded once.

Summing them in the loop of the next product makes Triton 3.7 keep a buffer too few (seen for sm_90).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import DOT_MIN, INTERPRETED, WIDEN

MAX_ROWS = 256
# Weights of more than 16 MiB, of Qwen3-1.7B and larger: with more rows than these a vendor's product, whose
# tiles are larger, reads them less often from the L2 cache. Both limits are estimates until `gpu.sh` has run.
LARGE_WEIGHT, MAX_ROWS_OF_LARGE = 8 << 20, 64
DTYPES = (torch.bfloat16, torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16,)
ROW_CLASSES = (DOT_MIN, 64, MAX_ROWS)  # steps of up to so many rows share their tiles
PROCESSORS = 132  # multiprocessors of an H100 or H200


class Tile(NamedTuple):
    """The size of a program's part; columns are of each product if there are two."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@triton.jit
def load_squares(squares_ptr, row, is_row, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    """Load the parts of each row's squares, [rows, PARTS_PAD], ahead of a product's loop."""
    part = tl.arange(0, PARTS_PAD)[None, :]
    is_part = is_row[:, None] & (part < PARTS)
    return tl.load(squares_ptr + row[:, None] * PARTS + part, mask=is_part, other=0.0)


@triton.jit
def multiply(
    x_ptr, weight_ptr, row, is_row, column, is_column, x_stride,
    IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x by rows `column` of the weight and, unless it is None, by those SECOND rows after.

    Returns two tiles [ROWS, COLUMNS] float32, the second of zeros if there is none.
    """
    depth = tl.arange(0, DEPTH)
    x_places = x_ptr + row[:, None] * x_stride + depth[None, :]
    weight_places = weight_ptr + column[None, :].to(tl.int64) * IN + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = acc
    for done in tl.range(0, IN, DEPTH):
        if IN % DEPTH == 0:
            x_mask, weight_mask = is_row[:, None], is_column[None, :]
        else:
            x_mask = is_row[:, None] & (depth < IN - done)[None, :]
            weight_mask = is_column[None, :] & (depth < IN - done)[:, None]
        x = tl.load(x_places + done, mask=x_mask, other=0.0)
        weight = tl.load(weight_places + done, mask=weight_mask, other=0.0)
        if WIDEN:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        if SECOND is not None:
            weight = tl.load(weight_places + SECOND * IN + done, mask=weight_mask, other=0.0)
            if WIDEN:
                weight = weight.to(tl.float32)
            second = tl.dot(x, weight, second, input_precision="ieee")
    return acc, second


@triton.jit(do_not_specialize=["num_rows"])
def fused_product_kernel(
    out_ptr, squares_out_ptr, x_ptr, squares_ptr, weight_ptr, bias_ptr, residual_ptr, num_rows, x_stride, eps,
    IN: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of columns).

    squares_ptr: None without a norm, else PARTS sums of each row's squares.  bias_ptr, residual_ptr: None
    where nothing is added; with a residual, squares_out_ptr takes one sum of each row from each program.
    GATED: weight and bias have OUT rows of the gate, then OUT of up.  GELU: by tanh, in place of silu.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < OUT
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, row, is_row, PARTS, PARTS_PAD)
    acc, up = multiply(
        x_ptr, weight_ptr, row, is_row, column, is_column, x_stride,
        IN, ROWS, COLUMNS, DEPTH, OUT if GATED else None,
    )  # fmt: skip
    if squares_ptr is not None:
        inverse = tl.rsqrt(tl.sum(squares, 1) / IN + eps)[:, None]
        acc *= inverse
        up *= inverse
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + OUT + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if GATED:
        slope = acc
        if GELU:
            # as in gate_and_mul.py: (1 + tanh(y)) / 2 is sigmoid(2y)
            slope = tl.maximum(1.5957691216057308 * acc * (1.0 + 0.044715 * acc * acc), -80.0)
        acc = acc / (1.0 + tl.exp(-slope)) * up
    places = row[:, None] * OUT + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
        # squares of the sum as it is stored, and of zeros outside
        stored = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        part_of_row = squares_out_ptr + row * tl.num_programs(1) + tl.program_id(1)
        tl.store(part_of_row, tl.sum(stored * stored, 1), mask=is_row)
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def serves(num_rows: int, weight: Tensor) -> bool:
    """Return whether these products are faster for that many rows and a weight [out, in]."""
    return num_rows <= (MAX_ROWS_OF_LARGE if weight.numel() > LARGE_WEIGHT else MAX_ROWS)


def norm_linear(x: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return norm(x) W^T + b, [rows, out], the norm's weight folded into W.

    x: [rows, in], contiguous in the last dimension, at most MAX_ROWS rows.  squares: [rows, parts] float32,
    contiguous, parts of the rows' sums of squares.  weight: [out, in] and bias: [out], in x's dtype.
    """
    return _product(x, weight, bias, norm=(squares, eps))


def norm_gate(x: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None, *, gelu: bool) -> Tensor:
    """Return silu(gate) * up, or gelu by tanh, [rows, out], of (gate, up) = norm(x) W^T + b.

    weight: [2 * out, in], the gate's rows first; the rest as for norm_linear.
    """
    return _product(x, weight, bias, norm=(squares, eps), gated=True, gelu=gelu)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return (residual + x W^T + b; its rows' squares, summed in parts, as norm_linear takes them).

    residual: [rows, out], contiguous; x, weight and bias as for norm_linear.
    """
    assert residual.is_contiguous()
    out_features = weight.shape[0]
    parts = triton.cdiv(out_features, choose_tile(len(x), out_features, gated=False).columns)
    squares = torch.empty((len(x), parts), dtype=torch.float32, device=x.device)
    return _product(x, weight, bias, added=(residual, squares)), squares


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    added: tuple[Tensor | None, Tensor | None] = (None, None),
    gated: bool = False,
    gelu: bool = False,
) -> Tensor:
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    (squares, eps), (residual, squares_out) = norm, added
    num_parts = 1 if squares is None else squares.shape[1]
    tile = choose_tile(num_rows, out_features, gated=gated)
    if num_rows:
        fused_product_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(out_features, tile.columns))](
            out, squares_out, x, squares, weight, bias, residual, num_rows, x.stride(0), eps,
            IN=in_features, OUT=out_features,
            PARTS=num_parts, PARTS_PAD=triton.next_power_of_2(num_parts), GATED=gated, GELU=gelu,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out


def choose_tile(num_rows: int, out_features: int, *, gated: bool) -> Tile:
    """Choose the tiles with which the busiest multiprocessor reads least, alike for a class of rows."""
    most = next(size for size in ROW_CLASSES if num_rows <= size)
    if INTERPRETED:
        return Tile(min(most, 64), 64, 64, 4, 3)  # it pays by the operation, not by the byte
    return _choose_tile(most, out_features, gated)


@cache
def _choose_tile(num_rows: int, out_features: int, gated: bool) -> Tile:
    if num_rows <= DOT_MIN:
        candidates = [Tile(DOT_MIN, columns, 128, 4, 4) for columns in (64, 32, 16)]
    else:
        # one warp group; two for accumulators that take more than 64 registers of each of its threads
        warps = {columns: 8 if gated and columns == 128 else 4 for columns in (128, 64, 32, 16)}
        candidates = [Tile(64, columns, 64, num_warps, 4) for columns, num_warps in warps.items()]
    if num_rows > 64:
        candidates += [Tile(128, columns, 64, 8, 4) for columns in (128, 64, 32)]

    def read(tile: Tile) -> int:
        programs = -(-num_rows // tile.rows) * -(-out_features // tile.columns)
        return -(-programs // PROCESSORS) * (tile.rows + tile.columns * (2 if gated else 1))

    return min(candidates, key=read)
