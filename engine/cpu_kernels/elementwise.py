"""What a layer does besides products and attention, one pass over memory each: see LayerKernels.

Tensors are float32 or bfloat16, contiguous in their last dimension; what a kernel takes and gives is of one
dtype, except that norms' weights, cosines and sines may be float32 beside bfloat16. All is computed in
float32 and each result rounded once; a norm is of the sum as it is rounded. Results are contiguous.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, int64, njit
from torch import Tensor

from engine.cpu_kernels.kernel import Kernel, element_of, next_task
from engine.cpu_kernels.softmax import exp_of_negative
from engine.cpu_kernels.vectors import FLOAT32, float_of, narrow, pointer_to, row_pointer, wide

GELU_LINEAR = np.float32(2 * (2 / np.pi) ** 0.5)  # gelu's tanh is of sqrt(2 / pi) * (x + 0.044715 x^3)
GELU_CUBIC = np.float32(0.044715 * 2 * (2 / np.pi) ** 0.5)
ROWS_PER_TASK = 8  # so many rows of 512 floats take about 2 us, what it costs to wake a thread


def store_kv(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Copy each token's keys and values to its slot; a slot of -1 is skipped.

    keys, values: [tokens, kv_heads, head_dim], heads adjacent.  key_cache, value_cache: [blocks, block,
    kv_heads, head_dim] contiguous.  slot_mapping: [tokens] int64.
    """
    row_len = keys.shape[1] * keys.shape[2]
    _store_kernel(element_of(keys))(
        _num_tasks(keys), len(keys), keys, keys.stride(0), values, values.stride(0), key_cache, value_cache,
        slot_mapping, row_len,
    )  # fmt: skip


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of x + residual, x + residual). x, residual: [tokens, dim] contiguous."""
    normed, total = torch.empty_like(x), torch.empty_like(x)
    dim = x.shape[1]
    kernel = _norm_kernel(True, element_of(x), element_of(weight))
    kernel(_num_tasks(x), len(x), x, dim, residual, weight, normed, total, dim, eps)
    return normed, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight. x: [..., dim], where rows may lie apart; weight: [dim]."""
    rows = x.flatten(0, -2)
    normed = x.new_empty(x.shape)
    kernel = _norm_kernel(False, element_of(x), element_of(weight))
    kernel(_num_tasks(rows), len(rows), rows, rows.stride(0), 0, weight, normed, 0, rows.shape[1], eps)
    return normed


def norm_and_rotate(
    query: Tensor,
    key: Tensor,
    rotation: tuple[Tensor, Tensor],
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalise each head, unless norm_weights is None, then rotate it by its position.

    query, key: [tokens, heads, head_dim], heads adjacent.  rotation: cosines and sines [tokens, 1,
    rotary_dim]; a head's numbers from rotary_dim on are not rotated.  norm_weights: [head_dim] each, or
    [heads, head_dim] where each head has its own; contiguous.
    """
    cos, sin = rotation
    rotary_dim, turned = cos.shape[-1], []
    for heads, weight in zip((query, key), norm_weights or (None, None), strict=True):
        out = heads.new_empty(heads.shape)
        num_tokens, num_heads, head_dim = heads.shape
        kernel = _rotate_kernel(
            weight is not None,
            rotary_dim < head_dim,
            element_of(heads),
            element_of(cos),
            FLOAT32 if weight is None else element_of(weight),
        )
        kernel(
            _num_tasks(heads), num_tokens, heads, heads.stride(0), num_heads, head_dim, cos, sin,
            cos.stride(0), rotary_dim, 0 if weight is None else weight,
            head_dim if weight is not None and weight.dim() == 2 else 0, out, eps,
        )  # fmt: skip
        turned.append(out)
    return turned[0], turned[1]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [tokens, 2 * dim] contiguous -> [tokens, dim]."""
    return _gate(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its approximation by tanh. Shapes as for silu_and_mul."""
    return _gate(gate_up, gelu=True)


def _gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    _gate_kernel(gelu, element_of(gate_up))(_num_tasks(gate_up), num_tokens, gate_up, out, width // 2)
    return out


def _num_tasks(rows: Tensor) -> int:
    return -(-len(rows) // ROWS_PER_TASK)


@njit  # type: ignore[untyped-decorator]
def _rows_of_task(task: Any, num_rows: Any) -> Any:
    return range(task * ROWS_PER_TASK, min(num_rows, (task + 1) * ROWS_PER_TASK))


@njit  # type: ignore[untyped-decorator]
def _row(address: Any, index: Any, stride: Any, length: Any, element: Any) -> Any:
    """Row `index` of a matrix of that element type, whose rows are `stride` numbers apart."""
    return carray(row_pointer(address, index, stride, element), (length,))


@njit(fastmath=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _inverse_rms(row: Any, eps: Any) -> Any:
    total = np.float32(0)
    for i in range(len(row)):
        total += wide(row[i]) * wide(row[i])
    return np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)


@cache
def _store_kernel(element: Any) -> Kernel:
    def store(parameters: Any) -> None:
        num_rows, row_len = parameters[3], parameters[11]
        slots = pointer_to(parameters[10], int64)
        task = next_task(parameters)
        while task >= 0:
            for i in _rows_of_task(task, num_rows):
                if slots[i] >= 0:
                    key = _row(parameters[4], i, parameters[5], row_len, element)
                    value = _row(parameters[6], i, parameters[7], row_len, element)
                    cached_key = _row(parameters[8], slots[i], row_len, row_len, element)
                    cached_value = _row(parameters[9], slots[i], row_len, row_len, element)
                    for d in range(row_len):
                        cached_key[d] = key[d]
                    for d in range(row_len):
                        cached_value[d] = value[d]
            task = next_task(parameters)

    return Kernel(store)


@cache
def _norm_kernel(adds: bool, element: Any, weight_element: Any) -> Kernel:
    def norm(parameters: Any) -> None:
        num_rows, stride, dim = parameters[3], parameters[5], parameters[10]
        eps = np.float32(float_of(parameters[11]))
        weight = _row(parameters[7], 0, 0, dim, weight_element)
        task = next_task(parameters)
        while task >= 0:
            for i in _rows_of_task(task, num_rows):
                x = _row(parameters[4], i, stride, dim, element)
                normed = _row(parameters[8], i, dim, dim, element)
                if adds:
                    residual = _row(parameters[6], i, dim, dim, element)
                    total = _row(parameters[9], i, dim, dim, element)
                    for d in range(dim):
                        total[d] = narrow(wide(x[d]) + wide(residual[d]), element)
                    x = total
                factor = _inverse_rms(x, eps)
                for d in range(dim):
                    normed[d] = narrow(wide(x[d]) * factor * wide(weight[d]), element)
            task = next_task(parameters)

    return Kernel(norm)


@cache
def _rotate_kernel(
    normed: bool, partly: bool, element: Any, angle_element: Any, weight_element: Any
) -> Kernel:
    """partly: some of a head's numbers are not rotated.  angle_element: of cosines and sines."""

    def rotate(parameters: Any) -> None:
        num_rows, row_len, num_heads, head_dim = parameters[3], parameters[5], parameters[6], parameters[7]
        rotary_dim, weight_step = parameters[11], parameters[13]
        eps = np.float32(float_of(parameters[15]))
        half = rotary_dim // 2 if partly else head_dim // 2
        task = next_task(parameters)
        while task >= 0:
            for i in _rows_of_task(task, num_rows):
                cos = _row(parameters[8], i, parameters[10], rotary_dim, angle_element)
                sin = _row(parameters[9], i, parameters[10], rotary_dim, angle_element)
                heads = _row(parameters[4], i, row_len, num_heads * head_dim, element)
                for head in range(num_heads):
                    x = heads[head * head_dim : (head + 1) * head_dim]
                    out = _row(parameters[14], i * num_heads + head, head_dim, head_dim, element)
                    if normed:
                        weight = _row(parameters[12], head, weight_step, head_dim, weight_element)
                        factor = _inverse_rms(x, eps)
                        for d in range(half):
                            first = wide(x[d]) * factor * wide(weight[d])
                            second = wide(x[d + half]) * factor * wide(weight[d + half])
                            out[d] = narrow(first * wide(cos[d]) - second * wide(sin[d]), element)
                            turned = second * wide(cos[d + half]) + first * wide(sin[d + half])
                            out[d + half] = narrow(turned, element)
                        if partly:
                            for d in range(rotary_dim, head_dim):
                                out[d] = narrow(wide(x[d]) * factor * wide(weight[d]), element)
                    else:
                        for d in range(half):
                            first, second = wide(x[d]), wide(x[d + half])
                            out[d] = narrow(first * wide(cos[d]) - second * wide(sin[d]), element)
                            turned = second * wide(cos[d + half]) + first * wide(sin[d + half])
                            out[d + half] = narrow(turned, element)
                        if partly:
                            for d in range(rotary_dim, head_dim):
                                out[d] = x[d]
            task = next_task(parameters)

    return Kernel(rotate)


@cache
def _gate_kernel(gelu: bool, element: Any) -> Kernel:
    """gate * sigmoid(gate) * up; gelu by tanh is gate * sigmoid(2 * what the tanh is of), as well."""

    def gate_and_mul(parameters: Any) -> None:
        num_rows, dim = parameters[3], parameters[6]
        task = next_task(parameters)
        while task >= 0:
            for i in _rows_of_task(task, num_rows):
                gates = _row(parameters[4], 2 * i, dim, dim, element)
                ups = _row(parameters[4], 2 * i + 1, dim, dim, element)
                out = _row(parameters[5], i, dim, dim, element)
                for d in range(dim):
                    gate = wide(gates[d])
                    x = gate
                    if gelu:
                        x = GELU_LINEAR * x + GELU_CUBIC * x * x * x
                    small = exp_of_negative(-abs(x))
                    rising = np.float32(1) if x >= 0 else small
                    out[d] = narrow(gate * wide(ups[d]) * (rising / (np.float32(1) + small)), element)
            task = next_task(parameters)

    return Kernel(gate_and_mul)
