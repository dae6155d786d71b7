"""Storing a step's keys and values in the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    keys_ptr, values_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    num_tokens, key_stride, value_stride,
    ROW: tl.constexpr, ROW_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program copies all KV heads of TOKENS tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, ROW_PAD)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    inside = (slot >= 0)[:, None] & (column < ROW)
    token, slot = token[:, None], slot[:, None]
    keys = tl.load(keys_ptr + token * key_stride + column, mask=inside)
    values = tl.load(values_ptr + token * value_stride + column, mask=inside)
    tl.store(key_cache_ptr + slot * ROW + column, keys, mask=inside)
    tl.store(value_cache_ptr + slot * ROW + column, values, mask=inside)


def store_kv(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Scatter the new keys and values into their slots of the paged cache.

    keys, values: [tokens, kv_heads, head_dim]; rows may lie apart, a row must be contiguous.
    key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], contiguous.
    slot_mapping: [tokens] int64, block_id * block_size + offset; a negative one marks padding and writes
    nowhere.  Source: PagedAttention, arXiv:2309.06180, section 4.
    """
    row = keys.shape[1] * keys.shape[2]
    assert keys.stride()[1:] == values.stride()[1:] == (keys.shape[2], 1)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    row_pad = triton.next_power_of_2(row)
    tokens = max(1, 1024 // row_pad)
    store_kernel[(triton.cdiv(keys.shape[0], tokens),)](
        keys, values, key_cache, value_cache, slot_mapping,
        keys.shape[0], keys.stride(0), values.stride(0),
        ROW=row, ROW_PAD=row_pad, TOKENS=tokens,
        # 8 elements, 16 bytes of bfloat16, for each thread
        num_warps=min(tokens * row_pad // 256, 16),
    )  # fmt: skip
