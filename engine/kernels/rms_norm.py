"""RMSNorm, alone or with the residual addition before it. Source: arXiv:1910.07467."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, weight_ptr, num_rows, row_stride, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program normalises ROWS rows. residual_ptr, sum_ptr: None where nothing is added."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM_PAD)
    inside = (row < num_rows)[:, None] & (column < DIM)[None, :]
    places = row[:, None] * DIM + column[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    if residual_ptr is not None:
        x += tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
        # the norm is of the sum as it is stored, so that both results tell of the same numbers
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + places, total, mask=inside)
        x = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    weight = tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
    normed = x * inverse[:, None] * weight[None, :]
    tl.store(out_ptr + places, normed.to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of x + residual, x + residual).

    x, residual: [tokens, dim], contiguous.  weight: [dim], in x's dtype or float32.  Sums and products are
    float32, each result is rounded to x's dtype once.
    """
    assert x.is_contiguous()
    assert residual.is_contiguous()
    total = torch.empty_like(x)
    return _norm(x, residual, total, weight, eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x alone, contiguous. x: [..., dim], contiguous in the last dimension."""
    assert x.stride(-1) == 1
    # rows that lie evenly apart, as those cut out of a merged projection do, are read where they are
    return _norm(x.flatten(0, -2), None, None, weight, eps).view(x.shape)


def _norm(
    x: Tensor, residual: Tensor | None, total: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    num_rows, dim = x.shape
    dim_pad = triton.next_power_of_2(dim)
    rows = max(1, 1024 // dim_pad)
    out = torch.empty((num_rows, dim), dtype=x.dtype, device=x.device)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        out, total, x, residual, weight, num_rows, x.stride(0), eps,
        DIM=dim, DIM_PAD=dim_pad, ROWS=rows,
        # 8 elements, 16 bytes of bfloat16, for each thread
        num_warps=min(max(rows * dim_pad // 256, 1), 16),
    )  # fmt: skip
    return out
