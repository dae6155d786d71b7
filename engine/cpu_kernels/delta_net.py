"""The gated delta net between its projections: each head's state is read and written once for a token, in the pool.

A token's sums do not depend on what is computed with it, so that its bits do not either.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, int64, njit
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import FLOAT32, FLOAT_BYTES, float_of, narrow, pointer_to, row_pointer, wide
from engine.cpu_kernels.softmax import ONE, exp_of_negative, sigmoid
from engine.cpu_kernels.vectors import score_tokens

NORM_EPS = np.float32(1e-6)  # as in engine.layers.gated_delta_net
PART = 5  # fields of a part
ROWS = 16  # of a state, for values, which stay in the nearest cache from one pass to the next
ZERO = np.float32(0)


def delta_net(x: Tensor, memory: Sequence[Tensor], parts: Any, weights: Sequence[Tensor], heads: Any) -> Tensor:
    """Compute as `mix` of engine.layers.gated_delta_net; decodes by themselves, other parts one after the other."""
    out = x.new_empty(len(x), heads.num_values * heads.value_dim)
    num_decodes, num_parts = len(parts.decodes), len(parts.table)
    num_chains = num_decodes + (num_parts > num_decodes)
    scratch = 2 * heads.key_dim + (heads.group + 1) * heads.value_dim + 2 * ROWS
    kernel = _kernel(heads.key_dim, heads.value_dim, heads.kernel_size, x.dtype)
    kernel(
        num_chains * heads.num_heads, x, x.shape[1], *memory, parts.table, num_decodes, num_parts, *weights,
        heads.eps, out, torch.empty(torch.get_num_threads() * scratch), scratch, heads.num_heads, heads.group,
    )  # fmt: skip
    return out


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _begin(memory: Any, source: Any, target: Any, size: Any, first: Any, length: Any, element: Any) -> None:
    """Copy numbers of row `source` of a memory into row `target`, zeros for -1."""
    to = carray(row_pointer(memory, 1, target * size + first, element), (length,))
    if source < 0:
        for i in range(length):
            to[i] = ZERO
    elif source != target:
        given = carray(row_pointer(memory, 1, source * size + first, element), (length,))
        for i in range(length):
            to[i] = given[i]


@njit(fastmath={"contract", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _convolve(x: Any, seen: Any, weights: Any, num_channels: Any, steps: Any, out: Any, element: Any) -> None:
    """Convolve and activate a token's channels, and let it be seen. seen, weights: addresses of the first channel."""
    length = len(out)
    last = carray(row_pointer(weights, steps, num_channels, FLOAT32), (length,))
    for i in range(length):
        out[i] = last[i] * wide(x[i])
    for step in range(steps):
        weight = carray(row_pointer(weights, step, num_channels, FLOAT32), (length,))
        before = carray(row_pointer(seen, step, num_channels, element), (length,))
        after = x
        if step + 1 < steps:
            after = carray(row_pointer(seen, step + 1, num_channels, element), (length,))
        for i in range(length):
            out[i] += weight[i] * wide(before[i])
            before[i] = after[i]
    for i in range(length):
        out[i] = out[i] * sigmoid(out[i])


@njit(fastmath=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _product(a: Any, b: Any) -> Any:
    total = ZERO
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@njit(fastmath={"contract", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _scale(x: Any, factor: Any) -> None:
    for i in range(len(x)):
        x[i] *= factor


@njit(fastmath={"contract", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _correct(rows: Any, key: Any, values: Any, answers: Any, out: Any, factors: Any) -> None:
    """Let rows of a head's state fade, and take a value in. rows: [values * key_dim].

    answers: [2, ROWS], to the key and to the query.  factors: decay, rate, key times query.
    """
    decay, rate, both = factors
    key_dim = len(key)
    for d in range(len(values)):
        added = (values[d] - decay * answers[d]) * rate
        out[d] = decay * answers[ROWS + d] + both * added
        row = rows[d * key_dim : (d + 1) * key_dim]
        for i in range(key_dim):
            row[i] = decay * row[i] + added * key[i]


@cache
def _kernel(key_dim: int, value_dim: int, kernel_size: int, dtype: torch.dtype) -> Kernel:
    """A task is a head of keys with its values, of a decode or of all other parts."""
    element, steps = ELEMENTS[dtype], kernel_size - 1
    row_bytes, value_bytes = key_dim * FLOAT_BYTES, value_dim * FLOAT_BYTES
    item_bytes, state_size = element.bitwidth // 8, key_dim * value_dim
    scale, value_size = np.float32(key_dim**-0.5), np.float32(value_dim)

    def mix(parameters: Any) -> None:
        width, seen, states = parameters[4], parameters[5], parameters[6]
        num_decodes, num_parts = parameters[8], parameters[9]
        eps, num_heads, group = np.float32(float_of(parameters[14])), parameters[18], parameters[19]
        parts = pointer_to(parameters[7], int64)
        decays = pointer_to(parameters[11], FLOAT32)
        biases = pointer_to(parameters[12], FLOAT32)
        norm = pointer_to(parameters[13], FLOAT32)
        num_values = num_heads * group
        keys_size, values_size = num_heads * key_dim, num_values * value_dim
        num_channels = 2 * keys_size + values_size
        scratch = parameters[16] + worker_number(parameters) * parameters[17] * FLOAT_BYTES
        key = carray(pointer_to(scratch, FLOAT32), (key_dim,))
        query = carray(pointer_to(scratch + row_bytes, FLOAT32), (key_dim,))
        values = carray(pointer_to(scratch + 2 * row_bytes, FLOAT32), (group * value_dim,))
        found = carray(pointer_to(scratch + 2 * row_bytes + group * value_bytes, FLOAT32), (value_dim,))
        scores = scratch + 2 * row_bytes + (group + 1) * value_bytes
        answers = carray(pointer_to(scores, FLOAT32), (2 * ROWS,))
        task = next_task(parameters)
        while task >= 0:
            chain, head = task // num_heads, task % num_heads
            places = (head * key_dim, keys_size + head * key_dim, 2 * keys_size + head * group * value_dim)
            sizes = (key_dim, key_dim, group * value_dim)
            outs = (query, key, values)
            of_head = head * group * state_size
            for p in range(chain, chain + 1 if chain < num_decodes else num_parts):
                start, end = parts[p * PART], parts[p * PART + 1]
                source, target, saved = parts[p * PART + 2], parts[p * PART + 3], parts[p * PART + 4]
                for i in range(3):
                    for step in range(steps):
                        first = step * num_channels + places[i]
                        _begin(seen, source, target, steps * num_channels, first, sizes[i], element)
                _begin(states, source, target, num_values * state_size, of_head, group * state_size, FLOAT32)
                for row in range(start, end):
                    x = carray(row_pointer(parameters[3], row, width, element), (width,))
                    for i in range(3):
                        _convolve(
                            x[places[i] : places[i] + sizes[i]],
                            seen + (target * steps * num_channels + places[i]) * item_bytes,
                            parameters[10] + places[i] * FLOAT_BYTES, num_channels, steps, outs[i], element,
                        )  # fmt: skip
                    _scale(query, scale / np.sqrt(_product(query, query) + NORM_EPS))
                    _scale(key, ONE / np.sqrt(_product(key, key) + NORM_EPS))
                    both = _product(query, key)
                    for own in range(group):
                        value_head = head * group + own
                        rate = sigmoid(wide(x[num_channels + values_size + value_head]))
                        step_size = wide(x[num_channels + values_size + num_values + value_head]) + biases[value_head]
                        softplus = max(step_size, ZERO) + np.float32(math.log1p(exp_of_negative(-abs(step_size))))
                        decay = exp_of_negative(decays[value_head] * softplus)
                        place = target * num_values + value_head
                        factors = (decay, rate, both)
                        for d in range(0, value_dim, ROWS):
                            length = min(ROWS, value_dim - d)
                            rows = states + (place * value_dim + d) * row_bytes
                            score_tokens(
                                scratch, rows, row_bytes, length, rows + ROWS * row_bytes, scores, ROWS * FLOAT_BYTES,
                                2, key_dim, FLOAT32,
                            )  # fmt: skip
                            state = carray(pointer_to(rows, FLOAT32), (length * key_dim,))
                            taken = values[own * value_dim + d : own * value_dim + d + length]
                            _correct(state, key, taken, answers, found[d : d + length], factors)
                        factor = ONE / np.sqrt(_product(found, found) / value_size + eps)
                        first = num_channels + value_head * value_dim
                        gates = x[first : first + value_dim]
                        out = carray(
                            row_pointer(parameters[15], row * num_values + value_head, value_dim, element), (value_dim,)
                        )
                        for d in range(value_dim):
                            gate = wide(gates[d])
                            out[d] = narrow(found[d] * factor * norm[d] * gate * sigmoid(gate), element)
                if saved >= 0:
                    for i in range(3):
                        for step in range(steps):
                            first = step * num_channels + places[i]
                            _begin(seen, target, saved, steps * num_channels, first, sizes[i], element)
                    _begin(states, target, saved, num_values * state_size, of_head, group * state_size, FLOAT32)
            task = next_task(parameters)

    return Kernel(mix)
