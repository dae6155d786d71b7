"""Rotary position embedding of queries and keys in one launch, after their norms where a model has them.

Sources: arXiv:2104.09864; per-head norms as in Qwen3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_heads(
    out_ptr, x_ptr, weight_ptr, cos, sin, token, num_tokens, stride, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of some tokens; pairs are (i, i + HALF), what lies behind them stays.

    token: [tokens, 1, 1].  cos, sin: [tokens, 1, HALF_PAD].  PER_HEAD: each has its own norm's weight.
    """
    head = tl.arange(0, HEADS_PAD)[None, :, None]
    column = tl.arange(0, HALF_PAD)[None, None, :]
    inside = (token < num_tokens) & (head < HEADS) & (column < HALF)
    in_row = head * HEAD_DIM + column
    places = x_ptr + token * stride + in_row
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    if HEAD_DIM > 2 * HALF:
        rest_column = tl.arange(0, REST_PAD)[None, None, :]
        has_rest = (token < num_tokens) & (head < HEADS) & (rest_column < HEAD_DIM - 2 * HALF)
        rest_in_row = head * HEAD_DIM + 2 * HALF + rest_column
        rest = tl.load(x_ptr + token * stride + rest_in_row, mask=has_rest, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first + second * second, 2)
        if HEAD_DIM > 2 * HALF:
            square += tl.sum(rest * rest, 2)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, :, None]
        if PER_HEAD:
            weight_ptr += tl.minimum(head, HEADS - 1) * HEAD_DIM
        first *= inverse * tl.load(weight_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
        second *= inverse * tl.load(weight_ptr + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        if HEAD_DIM > 2 * HALF:
            rest_weight_ptr = weight_ptr + 2 * HALF + rest_column
            in_weight = rest_column < HEAD_DIM - 2 * HALF
            rest *= inverse * tl.load(rest_weight_ptr, mask=in_weight, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if HEAD_DIM > 2 * HALF:
        tl.store(out_ptr + token * (HEADS * HEAD_DIM) + rest_in_row, rest.to(dtype), mask=has_rest)
    places = out_ptr + token * (HEADS * HEAD_DIM) + in_row
    tl.store(places, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(places + HALF, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_and_rotate_kernel(
    query_out_ptr, key_out_ptr, query_ptr, key_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr,
    num_tokens, query_stride, key_stride, rotation_stride, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    TOKENS: tl.constexpr, NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """One program takes TOKENS tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    column = tl.arange(0, HALF_PAD)[None, None, :]
    inside = (token < num_tokens) & (column < HALF)
    places = token * rotation_stride + column
    cos = tl.load(cos_ptr + places, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + places, mask=inside, other=0.0).to(tl.float32)
    rotate_heads(
        query_out_ptr, query_ptr, query_weight_ptr, cos, sin, token, num_tokens, query_stride, eps,
        HEADS, HEADS_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM, PER_HEAD,
    )  # fmt: skip
    rotate_heads(
        key_out_ptr, key_ptr, key_weight_ptr, cos, sin, token, num_tokens, key_stride, eps,
        KV_HEADS, KV_HEADS_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM, PER_HEAD,
    )  # fmt: skip


def norm_and_rotate(
    query: Tensor,
    key: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, each head normalised if there are norms, then rotated; contiguous.

    query: [tokens, heads, head_dim]; key: [tokens, kv_heads, head_dim]; rows may lie apart.
    rotation: cosines and sines of each token's angles, [tokens, 1, width], both halves alike: of a head the
    first `width` numbers rotate, the others stay.
    norms: weights of the queries' and of the keys' RMSNorm, contiguous, in their dtype or in float32:
    [head_dim], or [heads, head_dim] and [kv_heads, head_dim] where each head has its own.
    All sums and products are float32, each result is rounded to the queries' dtype once.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    assert query.stride()[1:] == key.stride()[1:] == (head_dim, 1)
    cos, sin = rotation
    assert cos.stride() == sin.stride()
    query_weight, key_weight = norms or (query, key)  # not read without norms
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    half = cos.shape[-1] // 2
    heads_pad, half_pad = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    rest_pad = triton.next_power_of_2(max(head_dim - 2 * half, 1))
    pairs = heads_pad * max(half_pad, rest_pad // 2)  # of a token, those that only stay counted with them
    tokens = max(1, 1024 // pairs)
    norm_and_rotate_kernel[(triton.cdiv(len(query), tokens),)](
        query_out, key_out, query, key, query_weight, key_weight, cos, sin,
        len(query), query.stride(0), key.stride(0), cos.stride(0), eps,
        HEADS=heads, HEADS_PAD=heads_pad, KV_HEADS=kv_heads, KV_HEADS_PAD=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim, HALF=half, HALF_PAD=half_pad, REST_PAD=rest_pad,
        TOKENS=tokens, NORM=norms is not None, PER_HEAD=query_weight.dim() == 2,
        # 16 queries' heads of 128: 8 pairs for each thread
        num_warps=min(max(tokens * pairs // 256, 1), 8),
    )  # fmt: skip
    return query_out, key_out
