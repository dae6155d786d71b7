"""Attention of one new token per sequence over the paged cache, each context cut into splits.

A program takes one split of one sequence for all query heads of one KV head, so that keys and values are
read once; a second kernel merges the splits. Sources: PagedAttention, arXiv:2309.06180; Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.kv_tile import (
    DOT_MIN,
    LOG2_E,
    base2_cap,
    first_seen,
    fold_tile,
    pad_head_dim,
    tile_tokens,
)

MAX_SPLITS = 32  # the merge holds one head's splits in registers: 32 * 128 float32 are 32 for each thread
MIN_SPLIT_TOKENS = 128  # below that, starting a program costs more than its reads take
# Programs for each multiprocessor: contexts differ by 20 times, and small pieces even the finish out.
PROGRAMS_PER_PROCESSOR = 64


@dataclass(frozen=True)
class DecodeRows:
    """The decoding sequences of a step, as tensors on the device.

    rows: [decodes] int32, each one's row in the queries.  context_lens: [decodes] int32, the new token
    included; 0 marks padding, which reads nothing and gets zeros.  block_tables: [decodes, blocks] int32.
    max_context_len: at least the longest of them, a host value, for the size of the launch.
    """

    rows: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_context_len: int


@triton.jit
def split_length(num_seen, num_splits, MIN_SPLIT: tl.constexpr, TILE: tl.constexpr):
    """Tokens of each split of what a query sees of its context: whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_seen, num_splits), TILE) * TILE, MIN_SPLIT)


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def decode_kernel(
    out_ptr, partial_ptr, logsum_ptr, query_ptr, keys_ptr, values_ptr, sinks_ptr,
    rows_ptr, context_lens_ptr, tables_ptr,
    log2_scale, num_splits, table_stride, query_stride, block_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Program (KV head, split, sequence). DIRECT: there is one split, and no merge will follow."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    first = first_seen(context_len - 1, WINDOW, CHUNK)
    length = split_length(context_len - first, num_splits, MIN_SPLIT, TILE)
    start = first + split * length
    end = tl.minimum(start + length, context_len)
    if not DIRECT:  # noqa: SIM102 - this one is decided when the kernel is compiled
        if start >= end:
            return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + group
    inside = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    row = tl.load(rows_ptr + seq).to(tl.int64)
    head_places = head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(query_ptr + row * query_stride + head_places, mask=inside, other=0.0)

    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    if sinks_ptr is not None:
        # a sink is a score without a value: it joins the softmax once, in the first split
        sinks = tl.load(sinks_ptr + head, mask=group < GROUP, other=0.0) * LOG2_E
        row_max = tl.where(split == 0, sinks, row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)
    last_seen = tl.zeros([GROUP_PAD], tl.int32) + (context_len - 1)
    for tile_start in tl.range(start, end, TILE):
        acc, row_max, row_sum = fold_tile(
            queries, acc, row_max, row_sum,
            keys_ptr + kv_head * HEAD_DIM, values_ptr + kv_head * HEAD_DIM, tables_ptr + seq * table_stride,
            tile_start + tl.arange(0, TILE), end, None, last_seen, log2_scale, block_stride, token_stride,
            HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, True,
        )  # fmt: skip

    # no context gives zeros, not 0 / 0
    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if DIRECT:
        places = out_ptr + row * (HEADS * HEAD_DIM) + head_places
        tl.store(places, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = (seq * num_splits + split) * HEADS
        tl.store(partial_ptr + part * HEAD_DIM + head_places, result, mask=inside)
        tl.store(logsum_ptr + part + head, row_max + tl.log2(row_sum), mask=group < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    out_ptr, partial_ptr, logsum_ptr, rows_ptr, context_lens_ptr, num_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence): weigh the results of the splits by their share of the whole softmax sum."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    num_seen = context_len - first_seen(context_len - 1, WINDOW, CHUNK)
    num_used = tl.cdiv(num_seen, split_length(num_seen, num_splits, MIN_SPLIT, TILE))
    split = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, DIM_PAD)
    used = split < num_used
    part = (seq * num_splits + split) * HEADS + head
    logsum = tl.load(logsum_ptr + part, mask=used, other=float("-inf"))
    top = tl.where(num_used > 0, tl.max(logsum, 0), 0.0)
    share = tl.exp2(logsum - top)
    places = partial_ptr + part[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(places, mask=used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(share, 0)
    result = tl.sum(partial * share[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    places = out_ptr + (row * HEADS + head) * HEAD_DIM + dims
    tl.store(places, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def choose_num_splits(num_programs: int, max_seen: int, num_processors: int) -> int:
    """How many splits each context may be cut into, when one split each makes num_programs programs.

    max_seen: most tokens that a query sees, of the longest context or through the layer's window.
    Enough to fill the device evenly, and bounded: the results of all splits take at most
    (PROGRAMS_PER_PROCESSOR * num_processors + num_programs) * group * head_dim * 4 bytes.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // num_programs)
    return max(1, min(wanted, MAX_SPLITS, -(-max_seen // MIN_SPLIT_TOKENS)))


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: DecodeRows,
    out: Tensor,
    *,
    scale: float,
    num_splits: int,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    min_split_tokens: int = MIN_SPLIT_TOKENS,
) -> None:
    """Write the attention of the batch's rows of `query` to the same rows of `out`.

    query, out: [tokens, heads, head_dim]; query's rows may lie apart, out is contiguous.
    key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], the new token's included.
    scale, window, chunk, soft_cap: as AttentionFeatures has them.  sinks: [heads] float32, contiguous.
    Sums are float32; the splits' results take decodes * num_splits * heads * head_dim * 4 bytes meanwhile.
    """
    heads, head_dim = query.shape[1:]
    assert query.stride()[1:] == (head_dim, 1)
    assert out.is_contiguous()
    block_size, kv_heads = key_cache.shape[1:3]
    group, dim_pad = heads // kv_heads, pad_head_dim(head_dim)
    num_decodes = len(batch.rows)
    tile = tile_tokens(dim_pad, key_cache.element_size())
    direct = num_splits == 1
    partial, logsum = out, out  # never touched if there is nothing to merge
    if not direct:
        parts = (num_decodes, num_splits, heads)
        partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=query.device)
        logsum = torch.empty(parts, dtype=torch.float32, device=query.device)
    # KV heads in the first place of the grid: neighbours in memory are read at the same time
    decode_kernel[(kv_heads, num_splits, num_decodes)](
        out, partial, logsum, query, key_cache, value_cache, sinks,
        batch.rows, batch.context_lens, batch.block_tables,
        scale * LOG2_E.value, num_splits, batch.block_tables.stride(0), query.stride(0),
        key_cache.stride(0), key_cache.stride(1),
        HEADS=heads, GROUP=group, GROUP_PAD=max(triton.next_power_of_2(group), DOT_MIN),
        HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size,
        WINDOW=window, CHUNK=chunk, SOFT_CAP=base2_cap(soft_cap),
        TILE=tile, MIN_SPLIT=min_split_tokens, DIRECT=direct,
        # Bound by memory. The stages are table lookup, copy of the tile, use: while one tile is used, the
        # next one's 32 KiB are on their way. More stages or warps only lower the number of programs.
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if not direct:
        merge_kernel[(heads, num_decodes)](
            out, partial, logsum, batch.rows, batch.context_lens, num_splits,
            HEADS=heads, HEAD_DIM=head_dim, DIM_PAD=dim_pad,
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            WINDOW=window, CHUNK=chunk, TILE=tile, MIN_SPLIT=min_split_tokens,
            num_warps=4,
        )  # fmt: skip
