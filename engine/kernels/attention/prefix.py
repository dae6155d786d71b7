"""Attention of decoding sequences to a prefix that they have in common, which is read once for a tile of them.

A program takes a part of a prefix and one KV head. Its queries are those of all heads in the KV head's group, of as
many sequences as fill a tile, so that products of matrices are as large as a prompt's. Its results are splits like
those of the decode kernel, which then computes the splits behind the prefix, and merges all.
Sources: cascade inference, https://flashinfer.ai/2024/02/02/cascade-inference.html; Hydragen, arXiv:2402.05099.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import (
    DOT_MIN,
    LOG2_E,
    LOWEST,
    Cache,
    base2_cap,
    fold_tiles,
    narrow_queries,
    pad_head_dim,
    split_length,
)
from engine.kernels.attention.prefill import prefill_shape
from engine.kernels.gpu_kind import kind_of

#: A prefix has whole tiles of keys, so that none is masked: its tokens are a multiple of this.
PREFIX_TILE = 64
#: Queries of a tile, those of all heads in a group of all its sequences.
TILE_QUERIES = 64
MAX_PREFIX_SPLITS = 16
MAX_REGISTERS = 65_280  # of a program: 255 for each of 256 threads

_TILE = tl.constexpr(PREFIX_TILE)
_SPLIT = tl.constexpr(512)  # at least so many tokens, as in the decode kernel
_MAX_SPLITS = tl.constexpr(MAX_PREFIX_SPLITS)


@dataclass(frozen=True)
class PrefixRows:
    """The prefixes that sequences of a step have in common, as tensors on the device.

    begins: [decodes] int32, the tokens of each sequence's prefix, fewer than its context; 0 for one without.
    members: [tiles, seqs of a tile] int32, the sequences of each tile, which share one prefix: at least one, then -1.
        The size of a tile is a power of two.
    num_tiles: [1] int32, how many of the tiles are in use; those behind them are stale.
    num_programs: how many programs a launch has, for all KV heads.
    """

    begins: Tensor
    members: Tensor
    num_tiles: Tensor
    num_programs: int


@triton.jit
def count_prefix_splits(num_tokens):
    """Return how many splits a prefix of num_tokens has."""
    return tl.cdiv(num_tokens, split_length(num_tokens, _SPLIT, _MAX_SPLITS, _TILE))


@triton.jit(do_not_specialize=["max_splits", "table_stride"])
def prefix_kernel(
    partial_ptr, logsum_ptr, query_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slopes_ptr,
    begins_ptr, members_ptr, num_tiles_ptr, rows_ptr, context_lens_ptr, tables_ptr,
    log2_scale, max_splits, table_stride, query_stride, block_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr, TILE_SEQS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (KV head, first item): takes every n-th item, n being the size of the grid's second axis.

    An item is one split of one tile.
    """
    kv_head = tl.program_id(0)
    keys_ptr += kv_head * HEAD_DIM
    values_ptr += kv_head * HEAD_DIM
    if key_scales_ptr is not None:
        log2_scale *= tl.load(key_scales_ptr + kv_head)
    query = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM_PAD)
    place, group = query // GROUP_PAD, query % GROUP_PAD
    head = kv_head * GROUP + group
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=group < GROUP, other=0.0) * LOG2_E

    num_tiles = tl.load(num_tiles_ptr)
    # tiles of one prefix read the same split at about the same time: it comes out of the cache
    for item in tl.range(
        tl.program_id(1), num_tiles * _MAX_SPLITS, tl.num_programs(1), num_stages=1
    ):
        tile, split = item % num_tiles, item // num_tiles
        first_seq = tl.load(members_ptr + tile * TILE_SEQS).to(tl.int64)
        num_tokens = tl.load(begins_ptr + first_seq)
        length = split_length(num_tokens, _SPLIT, _MAX_SPLITS, _TILE)
        start = split * length
        if start < num_tokens:
            seq = tl.load(
                members_ptr + tile * TILE_SEQS + place, mask=place < TILE_SEQS, other=-1
            ).to(tl.int64)
            is_used = (seq >= 0) & (group < GROUP)
            inside = is_used[:, None] & (dims < HEAD_DIM)[None, :]
            row = tl.load(rows_ptr + seq, mask=is_used, other=0).to(tl.int64)
            places = row[:, None] * query_stride + head[:, None] * HEAD_DIM + dims[None, :]
            queries = tl.load(query_ptr + places, mask=inside, other=0.0)
            last_seen = tl.load(context_lens_ptr + seq, mask=is_used, other=1) - 1
            queries_scale = log2_scale
            if key_scales_ptr is not None:
                queries, queries_scale = narrow_queries(queries, log2_scale)
            stop = tl.minimum(start + length, num_tokens)
            acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
            row_max = tl.full([QUERIES], LOWEST, tl.float32)
            row_sum = tl.zeros([QUERIES], tl.float32)
            acc, row_max, row_sum = fold_tiles(
                queries, acc, row_max, row_sum, keys_ptr, values_ptr, tables_ptr + first_seq * table_stride,
                start, stop, stop, None, last_seen, queries_scale, slopes, block_stride, token_stride,
                HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, TILE, False,
            )  # fmt: skip
            result = acc / row_sum[:, None]
            if value_scales_ptr is not None:
                result *= tl.load(value_scales_ptr + kv_head)
            part = (seq * max_splits + split) * HEADS + head
            tl.store(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
            tl.store(logsum_ptr + part, row_max + tl.log2(row_sum), mask=is_used)


def attend_to_prefixes(
    query: Tensor,
    cache: Cache,
    prefixes: PrefixRows,
    seqs: tuple[Tensor, Tensor, Tensor],
    splits: tuple[Tensor, Tensor],
    *,
    scale: float,
    soft_cap: float | None,
    slopes: Tensor | None,
) -> None:
    """Write the attention of each tile's sequences to their prefix, as the first of their splits.

    query, scale, soft_cap, slopes: as decode_attention has them.
    seqs: of all decoding sequences the rows, context lengths and block tables, as DecodeRows has them.
    splits: [decodes, splits, heads, head_dim] float32, each split's result, and [decodes, splits, heads] float32, the
    logarithm of its softmax sum, in base 2. There is room for MAX_PREFIX_SPLITS beside the sequences' own.
    """
    key_cache, value_cache, scales = cache
    heads, head_dim = query.shape[1:]
    block_size, kv_heads = key_cache.shape[1:3]
    group, dim_pad = heads // kv_heads, pad_head_dim(head_dim)
    group_pad = triton.next_power_of_2(group)
    rows, context_lens, block_tables = seqs
    partial, logsum = splits
    seqs_of_tile = prefixes.members.shape[1]
    shape = prefill_shape(dim_pad, query.element_size(), kind_of(query.device))
    prefix_kernel[(kv_heads, triton.cdiv(prefixes.num_programs, kv_heads))](
        partial, logsum, query, key_cache, value_cache, *(scales or (None, None)), slopes,
        prefixes.begins, prefixes.members, prefixes.num_tiles, rows, context_lens, block_tables,
        scale * LOG2_E.value, partial.shape[1], block_tables.stride(0), query.stride(0),
        key_cache.stride(0), key_cache.stride(1),
        HEADS=heads, GROUP=group, GROUP_PAD=group_pad,
        HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size, SOFT_CAP=base2_cap(soft_cap),
        TILE=min(shape.tile, PREFIX_TILE), TILE_SEQS=seqs_of_tile,
        QUERIES=max(seqs_of_tile * group_pad, DOT_MIN),
        num_warps=shape.num_warps, num_stages=shape.num_stages,
        # left to itself, the assembler makes room for another program, and spills
        maxnreg=min(MAX_REGISTERS // (32 * shape.num_warps), 255),
    )  # fmt: skip
