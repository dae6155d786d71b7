"""Activation of the gate times up, over the output of a merged gate and up projection."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 1024
ELEMENTS = 2048  # of one program: 16 for each thread, and enough programs for a small decode batch


@triton.jit(do_not_specialize=["num_rows"])
def gate_and_mul_kernel(
    out_ptr, gate_up_ptr, num_rows, row_stride, alpha, limit,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns). GELU: by tanh, in place of silu. CLAMPED: swiglu with alpha and limit."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < DIM)[None, :]
    places = gate_up_ptr + row[:, None] * row_stride + column[None, :]
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + DIM, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit) + 1.0
        slope = tl.maximum(alpha * gate, -80.0)
    if GELU:
        # (1 + tanh(y)) / 2 is sigmoid(2y), with y = sqrt(2 / pi) * (gate + 0.044715 gate^3);
        # where that is below -80 the product is 0 in any case
        slope = tl.maximum(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate), -80.0)
    result = gate / (1.0 + tl.exp(-slope)) * up
    out_places = out_ptr + row[:, None] * DIM + column[None, :]
    tl.store(out_places, result.to(out_ptr.dtype.element_ty), mask=inside)


def clamped_swiglu_and_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), clamped to `limit`: gpt-oss' experts."""
    return _gate_and_mul(gate_up, clamped=(alpha, limit))


def _gate_and_mul(
    gate_up: Tensor, *, gelu: bool = False, clamped: tuple[float, float] | None = None
) -> Tensor:
    """silu(gate) * up, or gelu by its approximation with tanh, arXiv:1606.08415.

    gate_up: [tokens, 2 * dim], contiguous in the last dimension -> [tokens, dim].
    """
    num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    columns = min(triton.next_power_of_2(dim), MAX_COLUMNS)
    rows = ELEMENTS // columns
    out = torch.empty((num_rows, dim), dtype=gate_up.dtype, device=gate_up.device)
    gate_and_mul_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(dim, columns))](
        out, gate_up, num_rows, gate_up.stride(0), *(clamped or (0.0, 0.0)),
        DIM=dim, COLUMNS=columns, ROWS=rows, GELU=gelu, CLAMPED=clamped is not None, num_warps=4,
    )  # fmt: skip
    return out


silu_and_mul, gelu_and_mul = _gate_and_mul, partial(_gate_and_mul, gelu=True)
