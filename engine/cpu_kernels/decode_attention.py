"""Paged decode attention: one query a sequence over its blocks of keys and values."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, int64
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import FLOAT_BYTES, float_of, helper, narrow, pointer_to
from engine.cpu_kernels.softmax import LEAST, ONE, exp_of_negative, softmax_numerators, tanh
from engine.cpu_kernels.vectors import add_weighted, rows_at_once, score_tokens

TASKS_PER_THREAD = 4  # with fewer sequences than that the KV heads of each are tasks of their own


@dataclass(frozen=True)
class DecodeRows:
    """A step's sequences with one new token, the longest first.

    rows: [decodes] int64, their rows of the query.  context_lens: [decodes] int64; 0 is a padding row.
    block_tables: [decodes, max_blocks] int32.  begins: [decodes] int64, how many tokens a kept state covers.
    max_seen: the most tokens that a sequence has after its `begins`.
    """

    rows: Tensor
    context_lens: Tensor
    block_tables: Tensor
    begins: Tensor
    max_seen: int


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    decode: DecodeRows,
    out: Tensor,
    *,
    state: Tensor | None = None,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Attend with each decode row's query to its context and write the result to the same row of `out`.

    query: [tokens, heads, head_dim], out: the same and contiguous, key_cache, value_cache: [blocks, block,
    kv_heads, head_dim] contiguous; all float32 or all bfloat16. Sums and softmax are float32. A padding row
    gets zeros. window, chunk, soft_cap, sinks, slopes (float32): as in AttentionFeatures. If a `begins` is above 0,
    window and chunk must be None.  state: of the prefixes that end at `begins`, as prefill_attention keeps it; None if
    all begins are 0.
    """
    num_heads, head_dim = query.shape[1:]
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_seqs = decode.rows.shape[0]
    num_threads = torch.get_num_threads()
    num_parts = 1 if num_seqs >= TASKS_PER_THREAD * num_threads else num_kv_heads
    query = query.contiguous()
    longest = max(1, decode.max_seen)
    limited = window is not None or chunk is not None
    window = min(window or longest, longest)
    chunk = min(chunk or longest, longest)
    most_seen = min(window, chunk)
    scratch = torch.empty(num_threads * num_heads * (most_seen + head_dim))
    kinds = (limited, soft_cap is not None, sinks is not None, slopes is not None)
    kernel = _kernel(head_dim, num_heads // num_kv_heads, *kinds, query.dtype)
    kernel(
        num_seqs * num_parts, query, key_cache, value_cache, out, decode.rows, decode.context_lens,
        decode.block_tables, decode.block_tables.shape[1], decode.begins, block_size, num_kv_heads, num_parts,
        scratch, most_seen, scale, window, chunk, 0.0 if soft_cap is None else float(soft_cap),
        0 if sinks is None else sinks, 0 if state is None else state, 0 if slopes is None else slopes,
    )  # fmt: skip


@helper(error_model="numpy")
def _next_address(
    table: Any,
    index: Any,
    first_block: Any,
    num_blocks: Any,
    pool: Any,
    other_pool: Any,
    block_bytes: Any,
) -> Any:
    """Return the address of the block after block `index`; after the last block, of the other pool's first block."""
    if index + 1 < num_blocks:
        return pool + table[index + 1] * block_bytes
    return other_pool + table[first_block] * block_bytes


@helper(fastmath={"contract"}, error_model="numpy")
def _cap(scores: Any, scale: Any, soft_cap: Any) -> Any:
    for i in range(len(scores)):
        scores[i] = soft_cap * tanh(scores[i] * (scale / soft_cap))


@helper(fastmath={"contract"}, error_model="numpy")
def _lower(scores: Any, slope: Any) -> None:
    for i in range(len(scores)):
        scores[i] -= slope * np.float32(len(scores) - 1 - i)


@cache
def _kernel(
    head_dim: int,
    group: int,
    limited: bool,
    has_cap: bool,
    has_sinks: bool,
    has_slopes: bool,
    dtype: torch.dtype,
) -> Kernel:
    """A task is a sequence with all or some of its KV heads. Prefetching the next block made it 1.5 times as fast."""
    rows = rows_at_once(group, head_dim)
    element = ELEMENTS[dtype]
    head_bytes = head_dim * (element.bitwidth // 8)
    sum_bytes = head_dim * FLOAT_BYTES

    def kernel(parameters: Any) -> None:
        query, keys, values, out = parameters[3], parameters[4], parameters[5], parameters[6]
        seq_rows = pointer_to(parameters[7], int64)
        context_lens = pointer_to(parameters[8], int64)
        begins = pointer_to(parameters[11], int64)
        table_len, block_size, kv_heads = parameters[10], parameters[12], parameters[13]
        num_parts, most_seen = parameters[14], parameters[16]
        scale = np.float32(float_of(parameters[17]))
        window, chunk = parameters[18], parameters[19]
        soft_cap = np.float32(float_of(parameters[20]))
        sinks, slopes = pointer_to(parameters[21], float32), pointer_to(parameters[23], float32)
        softmax_scale = ONE if has_cap else scale
        heads_of_part = kv_heads // num_parts
        token_bytes = kv_heads * head_bytes
        block_bytes = block_size * token_bytes
        score_bytes = most_seen * FLOAT_BYTES
        scores = parameters[15] + worker_number(parameters) * kv_heads * group * (
            score_bytes + sum_bytes
        )
        sums = scores + kv_heads * group * score_bytes
        task = next_task(parameters)
        while task >= 0:
            seq = task // num_parts
            first = task % num_parts * heads_of_part
            context_len = context_lens[seq]
            begin = begins[seq]
            if limited:
                begin = max(0, context_len - window, (context_len - 1) // chunk * chunk)
            first_block = begin // block_size
            num_blocks = (context_len + block_size - 1) // block_size
            table = carray(pointer_to(parameters[9] + seq * table_len * 4, int32), (table_len,))
            queries = query + seq_rows[seq] * group * token_bytes
            outputs = out + seq_rows[seq] * group * token_bytes
            # the scores of all tokens
            for i in range(first_block, num_blocks):
                start = max(begin, i * block_size)
                tokens = keys + table[i] * block_bytes + (start - i * block_size) * token_bytes
                ahead = _next_address(table, i, first_block, num_blocks, keys, values, block_bytes)
                for kv_head in range(first, first + heads_of_part):
                    for head in range(kv_head * group, (kv_head + 1) * group, rows):
                        score_tokens(
                            queries + head * head_bytes, tokens + kv_head * head_bytes, token_bytes,
                            min((i + 1) * block_size, context_len) - start,
                            ahead + kv_head * block_size * head_bytes,
                            scores + head * score_bytes + (start - begin) * FLOAT_BYTES, score_bytes,
                            rows, head_dim, element,
                        )  # fmt: skip
            # softmax: the scores become weights
            for head in range(first * group, (first + heads_of_part) * group):
                weighted = carray(pointer_to(sums + head * sum_bytes, float32), (head_dim,))
                weights = carray(
                    pointer_to(scores + head * score_bytes, float32), (context_len - begin,)
                )
                if has_cap:
                    _cap(weights, scale, soft_cap)
                if has_slopes:
                    _lower(weights, slopes[head] / softmax_scale)
                # others: the weight of what has no score here, the tokens of a shared prefix or the sink
                state = carray(pointer_to(parameters[22], float32), (head_dim + 2,))
                others, others_highest = np.float32(0), LEAST
                if begin > 0 and not limited:
                    place = (seq_rows[seq] * kv_heads * group + head) * (
                        sum_bytes + 2 * FLOAT_BYTES
                    )
                    state = carray(pointer_to(parameters[22] + place, float32), (head_dim + 2,))
                    others, others_highest = state[head_dim + 1], state[head_dim] / softmax_scale
                elif has_sinks:
                    others, others_highest = ONE, sinks[head] / softmax_scale
                total, highest = softmax_numerators(weights, softmax_scale, others_highest)
                factor = np.float32(0)
                if others > 0:
                    factor = exp_of_negative((others_highest - highest) * softmax_scale)
                    total += others * factor
                for j in range(context_len - begin):
                    weights[j] /= total
                for d in range(head_dim):
                    weighted[d] = np.float32(0)
                if begin > 0 and not limited:
                    for d in range(head_dim):
                        weighted[d] = state[d] * (factor / total)
            # the weighted sums of values
            for i in range(first_block, num_blocks):
                start = max(begin, i * block_size)
                tokens = values + table[i] * block_bytes + (start - i * block_size) * token_bytes
                ahead = _next_address(table, i, first_block, num_blocks, values, keys, block_bytes)
                for kv_head in range(first, first + heads_of_part):
                    for head in range(kv_head * group, (kv_head + 1) * group, rows):
                        add_weighted(
                            scores + head * score_bytes + (start - begin) * FLOAT_BYTES, score_bytes,
                            tokens + kv_head * head_bytes, token_bytes,
                            min((i + 1) * block_size, context_len) - start,
                            ahead + kv_head * block_size * head_bytes, sums + head * sum_bytes,
                            rows, head_dim, element,
                        )  # fmt: skip
            # the sums are rounded into the output
            for head in range(first * group, (first + heads_of_part) * group):
                weighted = carray(pointer_to(sums + head * sum_bytes, float32), (head_dim,))
                output = carray(pointer_to(outputs + head * head_bytes, element), (head_dim,))
                for d in range(head_dim):
                    output[d] = narrow(weighted[d], element)
            task = next_task(parameters)

    return Kernel(kernel)
