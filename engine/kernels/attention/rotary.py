"""Norms of heads, rotary position embedding, and the paged cache's new keys and values, in one launch.

Sources: arXiv:2104.09864; per-head norms as in Qwen3; PagedAttention, arXiv:2309.06180, section 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_store import as_stored
from engine.kernels.attention.kv_tile import Cache


@triton.jit
def rotate_heads(
    out_ptr, x_ptr, weight_ptr, scales_ptr, cos, sin, token, place, wanted, stride, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalise (with NORM) and rotate the heads of some tokens.

    Pairs are (i, i + HALF); numbers behind the pairs are not rotated.
    token, place: [tokens, 1, 1], rows of x and of the output.  wanted: [tokens, 1, 1], whether to compute a row at all.
    cos, sin: [tokens, 1, HALF_PAD].  scales_ptr: of the heads, where the output holds FP8 numbers.
    """
    head = tl.arange(0, HEADS_PAD)[None, :, None]
    column = tl.arange(0, HALF_PAD)[None, None, :]
    inside = wanted & (head < HEADS) & (column < HALF)
    in_row = head * HEAD_DIM + column
    places = x_ptr + token * stride + in_row
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    if HEAD_DIM > 2 * HALF:
        rest_column = tl.arange(0, REST_PAD)[None, None, :]
        has_rest = wanted & (head < HEADS) & (rest_column < HEAD_DIM - 2 * HALF)
        rest_in_row = head * HEAD_DIM + 2 * HALF + rest_column
        rest = tl.load(x_ptr + token * stride + rest_in_row, mask=has_rest, other=0.0).to(
            tl.float32
        )
    if NORM:
        square = tl.sum(first * first + second * second, 2)
        if HEAD_DIM > 2 * HALF:
            square += tl.sum(rest * rest, 2)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, :, None]
        first *= inverse * tl.load(weight_ptr + column, mask=column < HALF, other=0.0).to(
            tl.float32
        )
        second *= inverse * tl.load(weight_ptr + HALF + column, mask=column < HALF, other=0.0).to(
            tl.float32
        )
        if HEAD_DIM > 2 * HALF:
            rest_weight_ptr = weight_ptr + 2 * HALF + rest_column
            in_weight = rest_column < HEAD_DIM - 2 * HALF
            rest *= inverse * tl.load(rest_weight_ptr, mask=in_weight, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if HEAD_DIM > 2 * HALF:
        rest = as_stored(rest, scales_ptr, head, head < HEADS, dtype)
        tl.store(out_ptr + place * (HEADS * HEAD_DIM) + rest_in_row, rest, mask=has_rest)
    places = out_ptr + place * (HEADS * HEAD_DIM) + in_row
    rotated = as_stored(first * cos - second * sin, scales_ptr, head, head < HEADS, dtype)
    tl.store(places, rotated, mask=inside)
    rotated = as_stored(second * cos + first * sin, scales_ptr, head, head < HEADS, dtype)
    tl.store(places + HALF, rotated, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_rotate_store_kernel(
    query_out_ptr, key_cache_ptr, value_cache_ptr, query_ptr, key_ptr, value_ptr,
    query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr, slots_ptr, key_scales_ptr, value_scales_ptr,
    num_tokens, query_stride, key_stride, value_stride, rotation_stride, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    ROW_PAD: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program takes TOKENS tokens. A row of the cache is a slot.

    Queries come last: they take most registers, and by then nothing else is held. When they came first, 32 query heads
    beside 4 KV heads spilled on sm_86 and sm_89.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    column = tl.arange(0, HALF_PAD)[None, None, :]
    is_token = token < num_tokens
    inside = is_token & (column < HALF)
    places = token * rotation_stride + column
    cos = tl.load(cos_ptr + places, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + places, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    is_stored = slot >= 0
    rotate_heads(
        key_cache_ptr, key_ptr, key_weight_ptr, key_scales_ptr, cos, sin, token, slot, is_stored, key_stride,
        eps,
        KV_HEADS, KV_HEADS_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM,
    )  # fmt: skip
    in_row = tl.arange(0, ROW_PAD)[None, None, :]
    inside = is_stored & (in_row < KV_HEADS * HEAD_DIM)
    values = tl.load(value_ptr + token * value_stride + in_row, mask=inside)
    values = as_stored(
        values, value_scales_ptr, in_row // HEAD_DIM, in_row < KV_HEADS * HEAD_DIM,
        value_cache_ptr.dtype.element_ty,
    )  # fmt: skip
    tl.store(value_cache_ptr + slot * (KV_HEADS * HEAD_DIM) + in_row, values, mask=inside)
    rotate_heads(
        query_out_ptr, query_ptr, query_weight_ptr, None, cos, sin, token, token, is_token, query_stride, eps,
        HEADS, HEADS_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM,
    )  # fmt: skip


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
    """Normalise and rotate heads, store keys and values: see LayerKernels of layer_kernels.py.

    Rows of query, key and value may lie apart. rotation: cosines and sines, [tokens, 1, width], both halves
    alike. norms: contiguous, in the queries' dtype or float32. Results are rounded from float32 once.
    """
    key_cache, value_cache, scales = cache
    heads, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    assert query.stride()[1:] == key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    cos, sin = rotation
    assert cos.stride() == sin.stride()
    query_weight, key_weight = norms or (
        query,
        key,
    )  # the kernel takes pointers, not read without norms
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    half = cos.shape[-1] // 2
    heads_pad, half_pad = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    rest_pad = triton.next_power_of_2(max(head_dim - 2 * half, 1))
    # the pairs of a token; numbers that are not rotated count as pairs too
    pairs = heads_pad * max(half_pad, rest_pad // 2)
    tokens = max(1, 1024 // pairs)
    norm_rotate_store_kernel[(triton.cdiv(len(query), tokens),)](
        query_out, key_cache, value_cache, query, key, value, query_weight, key_weight, cos, sin,
        slot_mapping, *(scales or (None, None)),
        len(query), query.stride(0), key.stride(0), value.stride(0), cos.stride(0), eps,
        HEADS=heads, HEADS_PAD=heads_pad, KV_HEADS=kv_heads, KV_HEADS_PAD=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim, HALF=half, HALF_PAD=half_pad, REST_PAD=rest_pad,
        ROW_PAD=triton.next_power_of_2(kv_heads * head_dim),
        TOKENS=tokens, NORM=norms is not None,
        # 16 queries' heads of 128: 8 pairs for each thread
        num_warps=min(max(tokens * pairs // 256, 1), 8),
    )  # fmt: skip
    return query_out
