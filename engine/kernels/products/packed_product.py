"""Products with weights in 4 or 8 bits, unpacked in registers on the way to the matrix instructions."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import DOT_MIN, WIDEN
from engine.kernels.products.codes import NUMBERS

#: Columns of a block: powers of two, which share a scale.
BLOCKS = (128, 64, 32)
FEW_ROWS = 64


def block(kind: str, group: int) -> int | None:
    """Return how many columns are unpacked together, a divisor of the group; None if there is no such number."""
    return next((size for size in BLOCKS if group % size == 0), None)


def lay_out(words: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a weight out as words of four bytes, with scales and zeros by group, see PackedKernels."""
    as_integers = words.contiguous().view(torch.int32).squeeze(-1)
    return as_integers, scales.t().contiguous(), zeros.t().contiguous()


@triton.jit
def multiply_packed(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, row, inside_rows, column, inside_columns, x_stride,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    TABLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return x W^T of these rows and columns, [ROWS, COLUMNS] float32.

    The product takes a weight as code - zero, which is exact. The sum over DEPTH weights is multiplied by their scale.
    Where DEPTH spans groups, each weight is multiplied by its scale first. That is exact too: such scales are powers of
    two, in bfloat16.
    TABLE: what `code_numbers` returns. The threads of a warp hold its numbers, and take them from each other.
    """
    PER_WORD: tl.constexpr = 4 if KIND == "int8" or KIND == "fp8" else 8
    depth, word = tl.arange(0, DEPTH), tl.arange(0, DEPTH // PER_WORD)
    x_places = x_ptr + row[:, None] * x_stride + depth[None, :]
    word_places = words_ptr + column[:, None].to(tl.int64) * (IN // PER_WORD) + word[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if TABLE is not None:
        place = tl.arange(0, 16)
        numbers = tl.zeros([16], tl.float32)
        for i in tl.static_range(16):
            numbers = tl.where(place == i, TABLE[i], numbers)
        table = tl.broadcast_to(numbers.to(x_ptr.dtype.element_ty)[None, :], (COLUMNS, 16))
    for done in tl.range(0, IN, DEPTH):
        x = tl.load(x_places + done, mask=inside_rows[:, None], other=0.0)
        words = tl.load(word_places + done // PER_WORD, mask=inside_columns[:, None], other=0)
        group = done // GROUP * OUT + column
        if DEPTH > GROUP:
            groups = group[:, None] + tl.arange(0, DEPTH // GROUP)[None, :] * OUT
            scale = tl.load(scales_ptr + groups, mask=inside_columns[:, None], other=0.0)
        else:
            scale = tl.load(scales_ptr + group, mask=inside_columns, other=0.0)
        scale = scale.to(tl.float32)
        words = tl.interleave(words, words >> 8)
        if PER_WORD == 8:
            words = tl.interleave(words, words >> 4)
            codes = tl.interleave(words, words >> 16) & 15
        else:
            codes = tl.interleave(words, words >> 16) & 255
        if TABLE is not None:
            weight = tl.gather(table, codes, 1)
        elif KIND == "fp8":
            # e4m3's bits are those of a float16 with another bias: read as float16, the number is 2^8 times too small
            bits = ((codes & 128) << 8) | ((codes & 127) << 7)
            weight = bits.to(tl.int16).to(tl.float16, bitcast=True)
            scale *= 256.0
        elif KIND == "fp4":
            # e2m1's bits likewise: read as float16, the number is 2^14 times too small
            bits = ((codes & 8) << 12) | ((codes & 7) << 9)
            weight = bits.to(tl.int16).to(tl.float16, bitcast=True)
            scale *= 16384.0
        else:
            zero = tl.load(zeros_ptr + group, mask=inside_columns, other=0).to(tl.int32)
            weight = (codes - zero[:, None]).to(tl.float32)
        if DEPTH > GROUP:
            spread = tl.broadcast_to(scale[:, :, None], (COLUMNS, DEPTH // GROUP, GROUP))
            weight = weight.to(tl.float32) * tl.reshape(spread, (COLUMNS, DEPTH))
        weight = weight.to(tl.float32 if WIDEN else x.dtype)
        if WIDEN:
            x = x.to(tl.float32)
        product = tl.dot(x, tl.trans(weight), input_precision="ieee")
        acc += product if DEPTH > GROUP else product * scale[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def packed_product_kernel(
    out_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, num_rows, x_stride,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    TABLE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of columns)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_rows, inside_columns = row < num_rows, column < OUT
    acc = multiply_packed(
        x_ptr, words_ptr, scales_ptr, zeros_ptr, row, inside_rows, column, inside_columns, x_stride,
        IN, OUT, GROUP, KIND, TABLE, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside_columns, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    places = out_ptr + row[:, None] * OUT + column[None, :]
    inside = inside_rows[:, None] & inside_columns[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def packed_product(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    out_features: int,
    block: int,
    kind: str,
) -> Tensor:
    """Return x W^T + b for a weight that `lay_out` has laid out. x: [rows, in] -> [rows, out] in x's dtype."""
    num_rows, in_features = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    group = in_features // len(scales)
    block = widest_block(x, group, block, kind)
    rows, columns, depth, num_warps = choose_tile(num_rows, block, x.element_size())
    if num_rows:
        packed_product_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(out_features, columns))](
            out, x, words, scales, zeros, out if bias is None else bias, num_rows, x.stride(0),
            IN=in_features, OUT=out_features, GROUP=group, KIND=kind,
            TABLE=code_numbers(kind, x.dtype), HAS_BIAS=bias is not None,
            ROWS=rows, COLUMNS=columns, DEPTH=depth,
            num_warps=num_warps, num_stages=3,
        )  # fmt: skip
    return out


@cache
def code_numbers(kind: str, dtype: torch.dtype) -> tuple[float, ...] | None:
    """Return the numbers that the kernel looks up for a kind's codes, rounded to dtype; None if it looks up none."""
    if kind == "fp4" or kind not in NUMBERS:
        return None
    return tuple(torch.tensor(NUMBERS[kind], dtype=dtype, device="cpu").tolist())


def widest_block(x: Tensor, group: int, block: int, kind: str) -> int:
    """Return how many columns are unpacked together.

    They span several groups for fp4 in bfloat16 only: its scales are powers of two, so that the products stay exact.
    """
    if kind != "fp4" or x.dtype != torch.bfloat16:
        return block
    return next(size for size in (*BLOCKS, block) if x.shape[1] % size == 0 and size % group == 0)


def choose_tile(num_rows: int, block: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return a program's rows, columns, depth and warps. Few rows get many programs, as memory is the limit then."""
    few = num_rows <= DOT_MIN
    if itemsize == 4:
        return DOT_MIN if few else 64, 64, DOT_MIN, 8
    if few:
        return DOT_MIN, 32, block, 4
    return (64, 64, min(block, 64), 4) if num_rows <= FEW_ROWS else (128, 64, min(block, 64), 8)
