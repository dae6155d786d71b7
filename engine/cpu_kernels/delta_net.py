"""The gated delta net between its input and output products: a token reads and writes each head's state once.

A token has the same bits whatever tokens are computed with it.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, int64
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import (
    FLOAT32,
    FLOAT_BYTES,
    float_of,
    helper,
    narrow,
    pointer_to,
    row_pointer,
    wide,
)
from engine.cpu_kernels.softmax import ONE, exp_of_negative, sigmoid
from engine.cpu_kernels.vectors import score_tokens

NORM_EPS = np.float32(1e-6)  # as in engine.layers.gated_delta_net
FIELDS = 5  # of a part
ROWS = 16  # of a state, for values, which stay in the nearest cache from one pass to the next
ZERO = np.float32(0)


def delta_net(
    x: Tensor, memory: Sequence[Tensor], parts: Any, weights: Sequence[Tensor], heads: Any
) -> Tensor:
    """Compute as engine.layers.gated_delta_net.mix does. Decodes run side by side, other parts one after the other."""
    num_heads = heads.num_heads
    group = heads.group
    value_dim = heads.value_dim
    out = x.new_empty(len(x), num_heads * group * value_dim)
    num_decodes = len(parts.decodes)
    num_parts = len(parts.table)
    num_chains = num_decodes + 1 if num_parts > num_decodes else num_decodes
    scratch_len = heads.num_channels + value_dim + 2 * ROWS
    scratch = torch.empty(torch.get_num_threads() * scratch_len)
    kernel = _kernel(group, heads.key_dim, value_dim, heads.kernel_size, x.dtype)
    kernel(
        num_chains * num_heads, x, *memory, parts.table, num_decodes, num_parts, *weights, heads.eps, out, scratch,
        scratch_len, num_heads,
    )  # fmt: skip
    return out


@helper(error_model="numpy")
def _copy(
    memory: Any, source: Any, target: Any, size: Any, num_heads: Any, head: Any, element: Any
) -> None:
    """Copy a head's numbers from row `source` of a memory to row `target`. If source is -1, write zeros."""
    to = carray(row_pointer(memory, target * num_heads + head, size, element), (size,))
    if source < 0:
        for i in range(size):
            to[i] = ZERO
    elif source != target:
        given = carray(row_pointer(memory, source * num_heads + head, size, element), (size,))
        for i in range(size):
            to[i] = given[i]


@helper(fastmath={"contract", "nsz"}, error_model="numpy")
def _convolve(x: Any, seen: Any, weights: Any, out: Any, steps: Any) -> None:
    """Convolve and activate a token's channels, and put them into `seen`: the last `steps` tokens' channels."""
    length = len(out)
    for i in range(length):
        out[i] = weights[steps * length + i] * wide(x[i])
    for step in range(steps):
        first = step * length
        for i in range(length):
            out[i] += weights[first + i] * wide(seen[first + i])
    for i in range((steps - 1) * length):
        seen[i] = seen[i + length]
    for i in range(length):
        if steps > 0:
            seen[(steps - 1) * length + i] = x[i]
        out[i] = out[i] * sigmoid(out[i])


@helper(fastmath=True, error_model="numpy")
def _product(a: Any, b: Any) -> Any:
    total = ZERO
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@helper(fastmath={"contract", "nsz"}, error_model="numpy")
def _correct(rows: Any, key: Any, values: Any, answers: Any, out: Any, factors: Any) -> None:
    """Let rows of a head's state decay, write a token's values into them, and put what the query reads into out.

    rows: [values * key_dim].  answers: [2 * ROWS], the rows times the query, then the rows times the key.
    factors: decay, rate, and the product of key and query.
    """
    decay, rate, both = factors
    key_dim = len(key)
    for d in range(len(values)):
        added = (values[d] - decay * answers[ROWS + d]) * rate
        out[d] = decay * answers[d] + both * added
        row = rows[d * key_dim : (d + 1) * key_dim]
        for i in range(key_dim):
            row[i] = decay * row[i] + added * key[i]


@cache
def _kernel(
    group: int, key_dim: int, value_dim: int, kernel_size: int, dtype: torch.dtype
) -> Kernel:
    """A task is one head of keys with its heads of values, in one decode or in all other parts."""
    element = ELEMENTS[dtype]
    steps = kernel_size - 1
    row_bytes = key_dim * FLOAT_BYTES
    num_values = group * value_dim
    num_channels = 2 * key_dim + num_values
    state_size = num_values * key_dim
    num_rows = num_channels + num_values + 2 * group
    conv_size = kernel_size * num_channels
    seen_size = steps * num_channels
    scale = np.float32(key_dim**-0.5)
    value_size = np.float32(value_dim)

    def mix(parameters: Any) -> None:
        seen, states, num_decodes, num_parts = (
            parameters[4],
            parameters[5],
            parameters[7],
            parameters[8],
        )
        parts = pointer_to(parameters[6], int64)
        norm = pointer_to(parameters[12], FLOAT32)
        eps, num_heads = np.float32(float_of(parameters[13])), parameters[17]
        scratch = parameters[15] + worker_number(parameters) * parameters[16] * FLOAT_BYTES
        convolved = carray(pointer_to(scratch, FLOAT32), (num_channels,))
        found = carray(pointer_to(scratch + num_channels * FLOAT_BYTES, FLOAT32), (value_dim,))
        scores = scratch + (num_channels + value_dim) * FLOAT_BYTES
        answers = carray(pointer_to(scores, FLOAT32), (2 * ROWS,))
        query, key = convolved[:key_dim], convolved[key_dim : 2 * key_dim]
        task = next_task(parameters)
        while task >= 0:
            chain, head = task // num_heads, task % num_heads
            weights = carray(row_pointer(parameters[9], head, conv_size, FLOAT32), (conv_size,))
            decays = carray(row_pointer(parameters[10], head, group, FLOAT32), (group,))
            biases = carray(row_pointer(parameters[11], head, group, FLOAT32), (group,))
            # each decode is a chain of its own; all other parts are the last chain
            for part in range(chain, chain + 1 if chain < num_decodes else num_parts):
                first, target, saved = (
                    part * FIELDS,
                    parts[part * FIELDS + 3],
                    parts[part * FIELDS + 4],
                )
                _copy(seen, parts[first + 2], target, seen_size, num_heads, head, element)
                _copy(states, parts[first + 2], target, state_size, num_heads, head, FLOAT32)
                place = target * num_heads + head
                before = carray(row_pointer(seen, place, seen_size, element), (seen_size,))
                for token in range(parts[first], parts[first + 1]):
                    row = token * num_heads + head
                    x = carray(row_pointer(parameters[3], row, num_rows, element), (num_rows,))
                    gates, rates = x[num_channels:], x[num_channels + num_values :]
                    out = carray(
                        row_pointer(parameters[14], row, num_values, element), (num_values,)
                    )
                    _convolve(x, before, weights, convolved, steps)
                    query_scale = scale / np.sqrt(_product(query, query) + NORM_EPS)
                    key_scale = ONE / np.sqrt(_product(key, key) + NORM_EPS)
                    for i in range(key_dim):
                        query[i] *= query_scale
                        key[i] *= key_scale
                    both = _product(query, key)
                    # each head of values that shares the key, with its matrix
                    for own in range(group):
                        step_size = wide(rates[group + own]) + biases[own]
                        softplus = max(step_size, ZERO) + np.float32(
                            math.log1p(exp_of_negative(-abs(step_size)))
                        )
                        factors = (
                            exp_of_negative(decays[own] * softplus),
                            sigmoid(wide(rates[own])),
                            both,
                        )
                        for d in range(0, value_dim, ROWS):
                            length = min(ROWS, value_dim - d)
                            begin = own * value_dim + d
                            rows = states + (place * num_values + begin) * row_bytes
                            score_tokens(
                                scratch, rows, row_bytes, length, rows + ROWS * row_bytes, scores, ROWS * FLOAT_BYTES,
                                2, key_dim, FLOAT32,
                            )  # fmt: skip
                            state = carray(pointer_to(rows, FLOAT32), (length * key_dim,))
                            values = convolved[2 * key_dim + begin : 2 * key_dim + begin + length]
                            _correct(state, key, values, answers, found[d : d + length], factors)
                        factor = ONE / np.sqrt(_product(found, found) / value_size + eps)
                        for d in range(value_dim):
                            gate = wide(gates[own * value_dim + d])
                            normed = found[d] * factor * norm[d]
                            out[own * value_dim + d] = narrow(
                                normed * gate * sigmoid(gate), element
                            )
                if saved >= 0:
                    _copy(seen, target, saved, seen_size, num_heads, head, element)
                    _copy(states, target, saved, state_size, num_heads, head, FLOAT32)
            task = next_task(parameters)

    return Kernel(mix)
