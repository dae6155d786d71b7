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
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of some tokens; pairs are (i, i + HALF).

    token: [tokens, 1, 1].  cos, sin: [tokens, 1, HALF_PAD].
    """
    head = tl.arange(0, HEADS_PAD)[None, :, None]
    column = tl.arange(0, HALF_PAD)[None, None, :]
    inside = (token < num_tokens) & (head < HEADS) & (column < HALF)
    in_row = head * (2 * HALF) + column
    places = x_ptr + token * stride + in_row
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean_square = tl.sum(first * first + second * second, 2) / (2 * HALF)
        inverse = tl.rsqrt(mean_square + eps)[:, :, None]
        first *= inverse * tl.load(weight_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
        second *= inverse * tl.load(weight_ptr + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    places = out_ptr + token * (HEADS * 2 * HALF) + in_row
    tl.store(places, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(places + HALF, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_and_rotate_kernel(
    query_out_ptr, key_out_ptr, query_ptr, key_ptr, query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr,
    num_tokens, query_stride, key_stride, rotation_stride, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
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
        HEADS, HEADS_PAD, HALF, HALF_PAD, NORM,
    )  # fmt: skip
    rotate_heads(
        key_out_ptr, key_ptr, key_weight_ptr, cos, sin, token, num_tokens, key_stride, eps,
        KV_HEADS, KV_HEADS_PAD, HALF, HALF_PAD, NORM,
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
    rotation: cosines and sines of each token's angles, [tokens, 1, head_dim], both halves alike.
    norms: weights [head_dim] of the queries' and of the keys' RMSNorm.  All sums and products are float32.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    assert query.stride()[1:] == key.stride()[1:] == (head_dim, 1)
    cos, sin = rotation
    assert cos.stride() == sin.stride()
    query_weight, key_weight = norms or (query, key)  # not read without norms
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    heads_pad, half_pad = triton.next_power_of_2(heads), triton.next_power_of_2(head_dim // 2)
    tokens = max(1, 1024 // (heads_pad * half_pad))
    norm_and_rotate_kernel[(triton.cdiv(len(query), tokens),)](
        query_out, key_out, query, key, query_weight, key_weight, cos, sin,
        len(query), query.stride(0), key.stride(0), cos.stride(0), eps,
        HEADS=heads, HEADS_PAD=heads_pad, KV_HEADS=kv_heads, KV_HEADS_PAD=triton.next_power_of_2(kv_heads),
        HALF=head_dim // 2, HALF_PAD=half_pad, TOKENS=tokens, NORM=norms is not None,
        # 16 queries' heads of 128: 8 pairs for each thread
        num_warps=min(max(tokens * heads_pad * half_pad // 256, 1), 8),
    )  # fmt: skip
    return query_out, key_out
