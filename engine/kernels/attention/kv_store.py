"""Storing a step's keys and values in the paged cache."""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import WIDEN as INTERPRETED
from engine.kernels.attention.kv_tile import Cache


@triton.jit
def as_stored(x, scales_ptr, head, inside, dtype: tl.constexpr):
    """Convert x to the cache's dtype: with scales, to the nearest FP8 numbers. NaN stays NaN.

    head: the head of each number.  inside: the numbers that have one.
    """
    if scales_ptr is not None:
        x = x.to(tl.float32) / tl.load(scales_ptr + head, mask=inside, other=1.0)
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:
            # The interpreter cuts digits off. Adding 1.5 * 2^23 steps, and taking them away again, rounds to
            # a multiple of a step, to even from halfway, as a GPU does.
            step = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.abs(x), 0.015625))) - 3.0)
            x = (x + step * 12582912.0) - step * 12582912.0
            # nor does it know which bits are FP8's NaN
            x = tl.where(x == x, x, tl.full([1], 0x7FF00000, tl.int32).to(tl.float32, bitcast=True))
    return x.to(dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    keys_ptr, values_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, key_scales_ptr, value_scales_ptr,
    num_tokens, key_stride, value_stride,
    ROW: tl.constexpr, ROW_PAD: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One program copies all KV heads of TOKENS tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, ROW_PAD)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    inside = (slot >= 0)[:, None] & (column < ROW)
    token, slot = token[:, None], slot[:, None]
    keys = tl.load(keys_ptr + token * key_stride + column, mask=inside)
    values = tl.load(values_ptr + token * value_stride + column, mask=inside)
    dtype: tl.constexpr = key_cache_ptr.dtype.element_ty
    keys = as_stored(keys, key_scales_ptr, column // HEAD_DIM, column < ROW, dtype)
    values = as_stored(values, value_scales_ptr, column // HEAD_DIM, column < ROW, dtype)
    tl.store(key_cache_ptr + slot * ROW + column, keys, mask=inside)
    tl.store(value_cache_ptr + slot * ROW + column, values, mask=inside)


def store_kv(keys: Tensor, values: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
    """Scatter the new keys and values into their slots of the paged cache.

    keys, values: [tokens, kv_heads, head_dim]; rows may lie apart, a row must be contiguous.
    slot_mapping: [tokens] int64, block_id * block_size + offset; a negative one marks padding and writes
    nowhere.  Source: PagedAttention, arXiv:2309.06180, section 4.
    """
    key_cache, value_cache, scales = cache
    row = keys.shape[1] * keys.shape[2]
    assert keys.stride()[1:] == values.stride()[1:] == (keys.shape[2], 1)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    row_pad = triton.next_power_of_2(row)
    tokens = max(1, 1024 // row_pad)
    store_kernel[(triton.cdiv(keys.shape[0], tokens),)](
        keys, values, key_cache, value_cache, slot_mapping,
        *(scales or (None, None)),
        keys.shape[0], keys.stride(0), values.stride(0),
        ROW=row, ROW_PAD=row_pad, TOKENS=tokens, HEAD_DIM=keys.shape[2],
        # 8 elements, 16 bytes of bfloat16, for each thread
        num_warps=min(tokens * row_pad // 256, 16),
    )  # fmt: skip
