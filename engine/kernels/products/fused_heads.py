"""The merged projection of a decode step down to the cache, in one launch: the norm before it, the product,
the norms of heads, their rotation, and storing keys and values.

A program computes whole heads of some rows, each half as a product of its own, so that the pairs which turn
together, (i, i + half), are in the same place of two tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import INTERPRETED
from engine.kernels.products.fused_product import load_squares, multiply

# With fewer rows a program for each head is fewer than multiprocessors, and each reads more than the smaller
# tiles of the product alone, which take no longer together with a launch for the rest. An estimate, too.
MIN_ROWS = 65
HEAD_DIMS = (64, 128)  # whose tiles fit
ROWS, DEPTH, NUM_WARPS, NUM_STAGES = 64, 64, 4, 4


@triton.jit(do_not_specialize=["num_rows"])
def project_heads_kernel(
    out_ptr, key_cache_ptr, value_cache_ptr, x_ptr, squares_ptr, weight_ptr, bias_ptr,
    query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, slots_ptr, num_rows, x_stride, rotation_stride, eps,
    IN: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, head): the heads of queries, of keys, then of values.

    bias_ptr, query_norm_ptr: None without.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    is_row, column = row < num_rows, tl.arange(0, HALF)
    squares = load_squares(squares_ptr, row, is_row, PARTS, PARTS_PAD)
    in_weight = head * (2 * HALF) + column
    first, second = multiply(
        x_ptr, weight_ptr, row, is_row, in_weight, column < HALF, x_stride, IN, ROWS, HALF, DEPTH, HALF
    )
    inverse = tl.rsqrt(tl.sum(squares, 1) / IN + eps)[:, None]
    first *= inverse
    second *= inverse
    if bias_ptr is not None:
        first += tl.load(bias_ptr + in_weight).to(tl.float32)[None, :]
        second += tl.load(bias_ptr + in_weight + HALF).to(tl.float32)[None, :]

    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    if query_norm_ptr is not None:
        inverse = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        is_own = column < tl.where(is_query, HALF, 0)
        first_norm = tl.load(query_norm_ptr + column, mask=is_own, other=0.0).to(tl.float32)
        second_norm = tl.load(query_norm_ptr + HALF + column, mask=is_own, other=0.0).to(tl.float32)
        is_own = column < tl.where(is_key, HALF, 0)
        first_norm += tl.load(key_norm_ptr + column, mask=is_own, other=0.0).to(tl.float32)
        second_norm += tl.load(key_norm_ptr + HALF + column, mask=is_own, other=0.0).to(tl.float32)
        first = tl.where(is_value, first, first * inverse * first_norm[None, :])
        second = tl.where(is_value, second, second * inverse * second_norm[None, :])
    places = row[:, None] * rotation_stride + column[None, :]
    cos = tl.load(cos_ptr + places, mask=is_row[:, None], other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + places, mask=is_row[:, None], other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    turned = tl.where(is_value, first, first * cos - second * sin).to(dtype)
    turned_second = tl.where(is_value, second, second * cos + first * sin).to(dtype)

    wanted = (is_row & is_query)[:, None]
    places = out_ptr + row[:, None] * (HEADS * 2 * HALF) + in_weight[None, :]
    tl.store(places, turned, mask=wanted)
    tl.store(places + HALF, turned_second, mask=wanted)
    slot = tl.load(slots_ptr + row, mask=is_row, other=-1).to(tl.int64)
    slot_places = slot[:, None] * (KV_HEADS * 2 * HALF) + in_weight[None, :]
    wanted = ((slot >= 0) & is_key)[:, None]
    places = key_cache_ptr + slot_places - HEADS * 2 * HALF
    tl.store(places, turned, mask=wanted)
    tl.store(places + HALF, turned_second, mask=wanted)
    wanted = ((slot >= 0) & is_value)[:, None]
    places = value_cache_ptr + slot_places - (HEADS + KV_HEADS) * 2 * HALF
    tl.store(places, turned, mask=wanted)
    tl.store(places + HALF, turned_second, mask=wanted)


def serves_heads(num_rows: int, head_dim: int, rotary_dim: int) -> bool:
    """Whether `project_heads` is the faster way for that many rows, and computes such heads.

    For no more rows than `serves` of fused_product.py lets through.
    """
    fits = head_dim in HEAD_DIMS or (INTERPRETED and head_dim == triton.next_power_of_2(head_dim))
    return num_rows >= MIN_ROWS and rotary_dim == head_dim and bool(fits)


def project_heads(
    x: Tensor,
    squares: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Return the rotated queries of norm(x) W^T + b, [rows, heads, head_dim]; store its keys and values.

    x, squares, weight and bias: as norm_linear of fused_product.py takes them, the weight's rows those of the
    queries' heads, the keys', the values'.
    rotation, norms, caches and slots: as norm_rotate_and_store of rotary.py takes them, with cosines and
    sines as wide as a head, one weight [head_dim] for all heads, the same eps and caches in x's dtype.
    All sums and products are float32, each result is rounded to x's dtype once.
    """
    num_rows, in_features = x.shape
    kv_heads, head_dim = key_cache.shape[2:]
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    cos, sin = rotation
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert key_cache.dtype == value_cache.dtype == x.dtype
    assert cos.stride() == sin.stride()
    assert cos.shape[-1] == head_dim
    query_norm, key_norm = norms or (None, None)
    out = torch.empty((num_rows, heads, head_dim), dtype=x.dtype, device=x.device)
    project_heads_kernel[(triton.cdiv(num_rows, ROWS), heads + 2 * kv_heads)](
        out, key_cache, value_cache, x, squares, weight, bias, query_norm, key_norm, cos, sin, slot_mapping,
        num_rows, x.stride(0), cos.stride(0), eps,
        IN=in_features, PARTS=squares.shape[1], PARTS_PAD=triton.next_power_of_2(squares.shape[1]),
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, ROWS=ROWS, DEPTH=DEPTH,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
