"""Paged decode attention: one query a sequence over its blocks of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, int64, njit
from torch import Tensor

from engine.cpu_kernels.kernel import Kernel, next_task, worker_number
from engine.cpu_kernels.softmax import softmax_numerators
from engine.cpu_kernels.vectors import (
    FLOAT_BYTES,
    add_weighted,
    float_of,
    pointer_to,
    rows_at_once,
    score_tokens,
)

TASKS_PER_THREAD = 4  # with fewer sequences than that the KV heads of each are tasks of their own


@dataclass(frozen=True)
class DecodeRows:
    """A step's sequences with one new token, the longest first.

    rows: [decodes] int64, their rows of the query.  context_lens: [decodes] int64; 0 is a padding row.
    block_tables: [decodes, max_blocks] int32.  max_context_len: the longest of them.
    """

    rows: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_context_len: int


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, decode: DecodeRows, out: Tensor, *, scale: float
) -> None:
    """Attend to the whole context with each decode row's query and write it to the same row of `out`.

    query: [tokens, heads, head_dim], out: the same and contiguous, key_cache, value_cache: [blocks, block,
    kv_heads, head_dim] contiguous; all float32. A padding row gets zeros.
    """
    num_heads, head_dim = query.shape[1:]
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_seqs, num_threads = len(decode.rows), torch.get_num_threads()
    num_parts = 1 if num_seqs >= TASKS_PER_THREAD * num_threads else num_kv_heads
    query = query.contiguous()
    scores = query.new_empty(num_threads * num_heads * max(1, decode.max_context_len))
    _kernel(head_dim, num_heads // num_kv_heads)(
        num_seqs * num_parts,
        query,
        key_cache,
        value_cache,
        out,
        decode.rows,
        decode.context_lens,
        decode.block_tables,
        decode.block_tables.shape[1],
        block_size,
        num_kv_heads,
        num_parts,
        scores,
        decode.max_context_len,
        scale,
    )


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _next_address(
    table: Any, index: Any, num_blocks: Any, pool: Any, other_pool: Any, block_bytes: Any
) -> Any:
    """Where the block after block `index` of the table begins; after the last one, the other pool's first."""
    if index + 1 < num_blocks:
        return pool + table[index + 1] * block_bytes
    return other_pool + table[0] * block_bytes


@cache
def _kernel(head_dim: int, group: int) -> Kernel:
    """One task is a sequence, or some KV heads of it: scores of the context, softmax, weighted values.

    Each load of a key or value serves the heads of a group. While a block is in work, the next one is
    fetched in the order of its addresses: measured, 1.5 times faster, for the context is in no cache.
    """
    rows = rows_at_once(group, head_dim)
    head_bytes = head_dim * FLOAT_BYTES

    def kernel(parameters: Any) -> None:
        query, keys, values, out = parameters[3], parameters[4], parameters[5], parameters[6]
        seq_rows = pointer_to(parameters[7], int64)
        context_lens = pointer_to(parameters[8], int64)
        table_len, block_size, kv_heads = parameters[10], parameters[11], parameters[12]
        num_parts, max_context_len = parameters[13], parameters[15]
        scale = np.float32(float_of(parameters[16]))
        heads_of_part = kv_heads // num_parts
        token_bytes = kv_heads * head_bytes
        block_bytes = block_size * token_bytes
        score_bytes = max_context_len * FLOAT_BYTES
        scores = parameters[14] + worker_number(parameters) * kv_heads * group * score_bytes
        task = next_task(parameters)
        while task >= 0:
            seq = task // num_parts
            first = task % num_parts * heads_of_part
            context_len = context_lens[seq]
            num_blocks = (context_len + block_size - 1) // block_size
            table = carray(pointer_to(parameters[9] + seq * table_len * 4, int32), (table_len,))
            queries = query + seq_rows[seq] * group * token_bytes
            outputs = out + seq_rows[seq] * group * token_bytes
            for i in range(num_blocks):
                start = i * block_size
                block = keys + table[i] * block_bytes
                ahead = _next_address(table, i, num_blocks, keys, values, block_bytes)
                for kv_head in range(first, first + heads_of_part):
                    for head in range(kv_head * group, (kv_head + 1) * group, rows):
                        score_tokens(
                            queries + head * head_bytes,
                            block + kv_head * head_bytes,
                            token_bytes,
                            min(block_size, context_len - start),
                            ahead + kv_head * block_size * head_bytes,
                            scores + head * score_bytes + start * FLOAT_BYTES,
                            score_bytes,
                            rows,
                            head_dim,
                        )
            for head in range(first * group, (first + heads_of_part) * group):
                output = pointer_to(outputs + head * head_bytes, float32)
                for d in range(head_dim):
                    output[d] = np.float32(0)
                weights = carray(pointer_to(scores + head * score_bytes, float32), (context_len,))
                total = softmax_numerators(weights, scale)
                for j in range(context_len):
                    weights[j] /= total
            for i in range(num_blocks):
                start = i * block_size
                block = values + table[i] * block_bytes
                ahead = _next_address(table, i, num_blocks, values, keys, block_bytes)
                for kv_head in range(first, first + heads_of_part):
                    for head in range(kv_head * group, (kv_head + 1) * group, rows):
                        add_weighted(
                            scores + head * score_bytes + start * FLOAT_BYTES,
                            score_bytes,
                            block + kv_head * head_bytes,
                            token_bytes,
                            min(block_size, context_len - start),
                            ahead + kv_head * block_size * head_bytes,
                            outputs + head * head_bytes,
                            rows,
                            head_dim,
                        )
            task = next_task(parameters)

    return Kernel(kernel)
