"""Numba kernels of norms, rotations with KV storing, gates and 8-bit rows: one pass over memory each, see LayerKernels.

Tensors are float32 or bfloat16, contiguous in their last dimension. All tensors of a call have one dtype; but with
bfloat16, weights of norms, cosines and sines may be float32. Kernels compute in float32 and round each result once. A
norm after a sum is computed from the rounded sum. Results are contiguous.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray, int64, uint8
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task
from engine.cpu_kernels.scalars import (
    FLOAT32,
    float32_of,
    float_of,
    helper,
    magnitude_bits,
    narrow,
    pointer_to,
    row_pointer,
    wide,
)
from engine.cpu_kernels.softmax import sigmoid

GELU_LINEAR = np.float32(
    2 * (2 / np.pi) ** 0.5
)  # gelu's tanh is of sqrt(2 / pi) * (x + 0.044715 x^3)
GELU_CUBIC = np.float32(0.044715 * 2 * (2 / np.pi) ** 0.5)
# As in engine.layers.int8.
SMALLEST = np.float32(2.0**-100)
LARGEST = np.float32(127)
ZERO = 128

ROWS_PER_TASK = 8  # rows of 512 floats take about 2 us, as long as it takes to wake a thread


Cache = tuple[
    Tensor, Tensor, object
]  # LayerKVCache: keys, values, [blocks, block, kv_heads, head_dim]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of x + residual, x + residual). x, residual: [tokens, dim] contiguous."""
    normed = torch.empty_like(x)
    total = torch.empty_like(x)
    num_rows, dim = x.shape
    kernel = _norm_kernel(True, x.dtype, weight.dtype)
    kernel(_num_tasks(num_rows), num_rows, x, dim, residual, weight, normed, total, dim, eps)
    return normed, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight. x: [..., dim], where rows may lie apart; weight: [dim]."""
    rows = x.flatten(0, -2)
    normed = x.new_empty(x.shape)
    num_rows, dim = rows.shape
    kernel = _norm_kernel(False, x.dtype, weight.dtype)
    kernel(_num_tasks(num_rows), num_rows, rows, rows.stride(0), 0, weight, normed, 0, dim, eps)
    return normed


def norm_rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: Cache,
    slot_mapping: Tensor,
) -> Tensor:
    """Normalise, rotate and store in one pass over the tokens; see LayerKernels.

    query, key, value: [tokens, heads, head_dim], heads adjacent.  rotation: cosines and sines [tokens, 1,
    rotary_dim].  norms: weights, contiguous.
    """
    key_cache, value_cache, _ = cache
    num_tokens, num_heads, head_dim = query.shape
    cos, sin = rotation
    query_norm, key_norm = (0, 0) if norms is None else norms
    out = query.new_empty(query.shape)
    weight_dtype = cos.dtype if norms is None else norms[0].dtype
    kernel = _turn_kernel(norms is not None, query.dtype, cos.dtype, weight_dtype)
    kernel(
        _num_tasks(num_tokens), num_tokens, num_heads, key.shape[1], head_dim, cos.shape[-1],
        query, query.stride(0), key, key.stride(0), value, value.stride(0), cos, sin, cos.stride(0),
        query_norm, key_norm, eps, out, key_cache, value_cache, slot_mapping,
    )  # fmt: skip
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as engine.layers.int8.quantize_rows does, to the same bits. x: [tokens, dim]; rows may lie apart."""
    num_tokens, dim = x.shape
    levels = torch.empty(num_tokens, dim, dtype=torch.uint8)
    scales = torch.empty(num_tokens, 1)
    _quantize_kernel(x.dtype)(
        _num_tasks(num_tokens), num_tokens, x, x.stride(0), levels, scales, dim
    )
    return levels, scales


def _gate(gate_up: Tensor, *, kind: str) -> Tensor:
    """silu(gate) * up, or gelu by tanh. gate_up: [tokens, 2 * dim] contiguous -> [tokens, dim]."""
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    _gate_kernel(kind, gate_up.dtype)(
        _num_tasks(num_tokens),
        num_tokens,
        gate_up,
        gate_up[:, width // 2 :],
        width,
        out,
        width // 2,
    )
    return out


silu_and_mul = partial(_gate, kind="silu")
gelu_and_mul = partial(_gate, kind="gelu")


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate). x, gate: [tokens, dim] contiguous."""
    num_tokens, dim = x.shape
    out = torch.empty_like(x)
    _gate_kernel("sigmoid", x.dtype)(_num_tasks(num_tokens), num_tokens, gate, x, dim, out, dim)
    return out


def _num_tasks(num_rows: int) -> int:
    return -(-num_rows // ROWS_PER_TASK)


@helper()
def _rows_of_task(task: Any, num_rows: Any) -> Any:
    return range(task * ROWS_PER_TASK, min(num_rows, (task + 1) * ROWS_PER_TASK))


@helper()
def _row(address: Any, index: Any, stride: Any, length: Any, element: Any) -> Any:
    """Return row `index` of a matrix of that element type, whose rows are `stride` numbers apart."""
    return carray(row_pointer(address, index, stride, element), (length,))


@helper(fastmath=True, error_model="numpy")
def _inverse_rms(row: Any, eps: Any) -> Any:
    total = np.float32(0)
    for i in range(len(row)):
        total += wide(row[i]) * wide(row[i])
    return np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)


@helper(error_model="numpy")
def _turn(
    x: Any, out: Any, weight: Any, cos: Any, sin: Any, factor: Any, normed: Any, element: Any
) -> None:
    """Normalise a head by its factor if `normed`, and rotate its first len(cos) numbers."""
    rotary_dim = len(cos)
    half = rotary_dim // 2
    for d in range(half):
        first, second = wide(x[d]), wide(x[d + half])
        if normed:
            first = first * factor * wide(weight[d])
            second = second * factor * wide(weight[d + half])
        out[d] = narrow(first * wide(cos[d]) - second * wide(sin[d]), element)
        out[d + half] = narrow(second * wide(cos[d + half]) + first * wide(sin[d + half]), element)
    for d in range(rotary_dim, len(x)):
        still = wide(x[d])
        if normed:
            still = still * factor * wide(weight[d])
        out[d] = narrow(still, element)


@cache
def _turn_kernel(
    normed: bool, dtype: torch.dtype, angle_dtype: torch.dtype, weight_dtype: torch.dtype
) -> Kernel:
    element = ELEMENTS[dtype]
    angle_element = ELEMENTS[angle_dtype]
    weight_element = ELEMENTS[weight_dtype]

    def turn(parameters: Any) -> None:
        num_rows, num_heads, kv_heads, head_dim = (
            parameters[3],
            parameters[4],
            parameters[5],
            parameters[6],
        )
        rotary_dim, eps = parameters[7], np.float32(float_of(parameters[19]))
        key_len = kv_heads * head_dim
        slots = pointer_to(parameters[23], int64)
        query_weight = _row(parameters[17], 0, 0, head_dim, weight_element)
        key_weight = _row(parameters[18], 0, 0, head_dim, weight_element)
        task = next_task(parameters)
        while task >= 0:
            for i in _rows_of_task(task, num_rows):
                cos = _row(parameters[14], i, parameters[16], rotary_dim, angle_element)
                sin = _row(parameters[15], i, parameters[16], rotary_dim, angle_element)
                queries = _row(parameters[8], i, parameters[9], num_heads * head_dim, element)
                for head in range(num_heads):
                    x = queries[head * head_dim : (head + 1) * head_dim]
                    out = _row(parameters[20], i * num_heads + head, head_dim, head_dim, element)
                    factor = _inverse_rms(x, eps) if normed else np.float32(1)
                    _turn(x, out, query_weight, cos, sin, factor, normed, element)
                if slots[i] >= 0:
                    keys = _row(parameters[10], i, parameters[11], key_len, element)
                    for head in range(kv_heads):
                        x = keys[head * head_dim : (head + 1) * head_dim]
                        out = _row(
                            parameters[21], slots[i] * kv_heads + head, head_dim, head_dim, element
                        )
                        factor = _inverse_rms(x, eps) if normed else np.float32(1)
                        _turn(x, out, key_weight, cos, sin, factor, normed, element)
                    value = _row(parameters[12], i, parameters[13], key_len, element)
                    cached = _row(parameters[22], slots[i], key_len, key_len, element)
                    for d in range(key_len):
                        cached[d] = value[d]
            task = next_task(parameters)

    return Kernel(turn)


@cache
def _norm_kernel(adds: bool, dtype: torch.dtype, weight_dtype: torch.dtype) -> Kernel:
    element = ELEMENTS[dtype]
    weight_element = ELEMENTS[weight_dtype]

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
def _gate_kernel(kind: str, dtype: torch.dtype) -> Kernel:
    """All gates are computed with sigmoid: gelu by tanh(t) equals gate * sigmoid(2 * t)."""
    element = ELEMENTS[dtype]
    gelu = kind == "gelu"
    bare = kind == "sigmoid"

    def gate_and_mul(parameters: Any) -> None:
        num_rows, stride, dim = parameters[3], parameters[6], parameters[8]
        task = next_task(parameters)
        while task >= 0:
            for i in _rows_of_task(task, num_rows):
                gates = _row(parameters[4], i, stride, dim, element)
                ups = _row(parameters[5], i, stride, dim, element)
                out = _row(parameters[7], i, dim, dim, element)
                for d in range(dim):
                    gate = wide(gates[d])
                    x = gate
                    if gelu:
                        x = GELU_LINEAR * x + GELU_CUBIC * x * x * x
                    factor = np.float32(1) if bare else gate
                    out[d] = narrow(factor * wide(ups[d]) * sigmoid(x), element)
            task = next_task(parameters)

    return Kernel(gate_and_mul)


@cache
def _quantize_kernel(dtype: torch.dtype) -> Kernel:
    """The largest magnitude is found by comparing bits as integers: a maximum of floats would lose a NaN in LLVM."""
    element = ELEMENTS[dtype]

    def quantize(parameters: Any) -> None:
        num_rows, dim = parameters[3], parameters[8]
        scales = pointer_to(parameters[7], FLOAT32)
        task = next_task(parameters)
        while task >= 0:
            for i in _rows_of_task(task, num_rows):
                x = _row(parameters[4], i, parameters[5], dim, element)
                levels = _row(parameters[6], i, dim, dim, uint8)
                bits = magnitude_bits(SMALLEST)
                for d in range(dim):
                    bits = max(bits, magnitude_bits(wide(x[d])))
                largest = float32_of(bits)
                scales[i] = largest / LARGEST
                factor = LARGEST / largest
                for d in range(dim):
                    levels[d] = np.int32(np.rint(wide(x[d]) * factor)) + np.int32(ZERO)
            task = next_task(parameters)

    return Kernel(quantize)
