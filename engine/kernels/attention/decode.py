"""Attention of one new token per sequence over the paged cache, each context cut into splits.

A program takes splits of one sequence for all query heads of one KV head, so that keys and values are read
once; the program that ends last merges them. Splits depend on the context's own length and are merged in order:
a row has the same bits in every batch, unless it begins with a prefix that is read once for several rows. Then the
module `prefix` computes that prefix's splits first, and they are merged with those of the row's own tokens.
Sources: arXiv:2309.06180; Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import (
    DECODE_TILE_BYTES,
    DOT_MIN,
    FP8_STAGES,
    LOG2_E,
    NUM_STAGES,
    Cache,
    base2_cap,
    first_seen,
    fold_tiles,
    narrow_queries,
    pad_head_dim,
    split_length,
    tile_tokens,
)
from engine.kernels.attention.prefix import (
    MAX_PREFIX_SPLITS,
    PrefixRows,
    attend_to_prefixes,
    count_prefix_splits,
)

# 512 tokens of 8 heads of 128 are 2 MiB of bfloat16, and what is left of them for the merge 0.4 % of that.
SPLIT_TOKENS = 512
MAX_SPLITS = (
    32  # longer contexts have longer splits, so that all results of a batch take bounded memory
)
MERGED_ROWS = (
    16  # splits * heads that the merge holds at once: 16 * 128 float32 are 16 for each thread
)
# Programs for each multiprocessor: contexts differ by 20 times, and small pieces even the finish out.
PROGRAMS_PER_PROCESSOR = 32


@dataclass(frozen=True)
class DecodeRows:
    """The decoding sequences of a step, as tensors on the device.

    rows: [decodes] int32, each one's row in the queries.  context_lens: [decodes] int32, the new token
    included; 0 marks padding, which reads nothing and gets zeros.  block_tables: [decodes, blocks] int32.
    max_context_len: at least the longest context, on the host.
    order: [decodes] int32, the order in which the sequences start; None: that in which they stand here.
    prefixes: those that layers without window and chunk read once for several rows; None: there are none.
    """

    rows: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_context_len: int
    order: Tensor | None = None
    prefixes: PrefixRows | None = None


@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def decode_kernel(
    out_ptr, partial_ptr, logsum_ptr, arrived_ptr, query_ptr, keys_ptr, values_ptr,
    key_scales_ptr, value_scales_ptr, sinks_ptr, slopes_ptr, order_ptr, rows_ptr, context_lens_ptr,
    begins_ptr, tables_ptr,
    log2_scale, max_splits, table_stride, query_stride, block_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr, HEADS_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (KV head, sequence, first split): takes every n-th split, n being the size of the grid's third axis."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    first_split = tl.program_id(2)
    if order_ptr is not None:
        seq = tl.load(order_ptr + seq)
    seq = seq.to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    first = first_seen(context_len - 1, WINDOW, CHUNK)
    num_prefix_splits = 0
    if begins_ptr is not None:
        first = tl.load(begins_ptr + seq)  # such a layer has no window and no chunks
        num_prefix_splits = count_prefix_splits(first)
    length = split_length(context_len - first, SPLIT, MAX_SPLITS, TILE)
    # padding has one split, of no tokens
    num_splits = tl.maximum(tl.cdiv(context_len - first, length), 1)
    if first_split >= num_splits:
        return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + group
    inside = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    row = tl.load(rows_ptr + seq).to(tl.int64)
    head_places = head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(query_ptr + row * query_stride + head_places, mask=inside, other=0.0)
    last_seen = tl.zeros([GROUP_PAD], tl.int32) + (context_len - 1)
    keys_ptr += kv_head * HEAD_DIM
    values_ptr += kv_head * HEAD_DIM
    tables_ptr += seq * table_stride
    if key_scales_ptr is not None:
        log2_scale *= tl.load(key_scales_ptr + kv_head)
        queries, log2_scale = narrow_queries(queries, log2_scale)

    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=group < GROUP, other=0.0) * LOG2_E
    for split in tl.range(first_split, num_splits, tl.num_programs(2), num_stages=1):
        start = first + split * length
        end = tl.minimum(start + length, context_len)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        row_sum = tl.zeros([GROUP_PAD], tl.float32)
        if sinks_ptr is not None:
            # a sink is a score without a value: it joins the softmax once, in the first split
            sinks = tl.load(sinks_ptr + head, mask=group < GROUP, other=0.0) * LOG2_E
            row_max = tl.where(split == 0, sinks, row_max)
            row_sum = tl.where(split == 0, 1.0, row_sum)
        acc, row_max, row_sum = fold_tiles(
            queries, acc, row_max, row_sum, keys_ptr, values_ptr, tables_ptr,
            start, end, end, None, last_seen, log2_scale, slopes, block_stride, token_stride,
            HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, TILE, True,
        )  # fmt: skip
        # no context gives zeros, not 0 / 0
        result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        if value_scales_ptr is not None:
            result *= tl.load(value_scales_ptr + kv_head)
        if num_splits + num_prefix_splits == 1:
            # loaded again: kept through the loop, it would take registers
            row = tl.load(rows_ptr + seq).to(tl.int64)
            places = out_ptr + row * (HEADS * HEAD_DIM) + head_places
            tl.store(places, result.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            part = (seq * max_splits + num_prefix_splits + split) * HEADS
            tl.store(partial_ptr + part * HEAD_DIM + head_places, result, mask=inside)
            tl.store(logsum_ptr + part + head, row_max + tl.log2(row_sum), mask=group < GROUP)

    if num_splits + num_prefix_splits > 1:
        tl.debug_barrier()  # all of this program's threads have stored before one of them says so
        arrived = arrived_ptr + seq * (HEADS // GROUP) + kv_head
        num_programs = tl.minimum(num_splits, tl.num_programs(2))
        # releases what this program stored; for the last one, acquires what the others did
        if tl.atomic_add(arrived, 1, sem="acq_rel") == num_programs - 1:
            tl.store(arrived, 0)  # as the next launch expects it
            row = tl.load(rows_ptr + seq).to(tl.int64)
            merge_splits(
                out_ptr + row * (HEADS * HEAD_DIM) + kv_head * (GROUP * HEAD_DIM),
                partial_ptr, logsum_ptr, seq * max_splits * HEADS + kv_head * GROUP,
                num_prefix_splits + num_splits,
                HEADS, GROUP, HEAD_DIM, DIM_PAD, MERGED_SPLITS, HEADS_PAD, PARTS,
            )  # fmt: skip


@triton.jit
def merge_splits(
    out_ptr, partial_ptr, logsum_ptr, first_part, num_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr, HEADS_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up the splits' results for one group of heads, weighed by their softmax sums.

    first_part: where the group's first head has its result of split 0.
    """
    head = tl.arange(0, HEADS_PAD)
    every, all_used = locate_parts(
        tl.arange(0, MAX_SPLITS), head, first_part, num_splits, HEADS, GROUP
    )
    # ".cg" reads past the multiprocessor's own cache, which knows nothing of what others stored
    all_logsums = tl.load(
        logsum_ptr + every, mask=all_used, other=float("-inf"), cache_modifier=".cg"
    )
    top = tl.where(head < GROUP, tl.max(all_logsums, 0), 0.0)
    total = tl.sum(tl.exp2(all_logsums - top[None, :]), 0)

    dims = tl.arange(0, DIM_PAD)
    acc = tl.zeros([HEADS_PAD, DIM_PAD], tl.float32)
    for start in tl.range(0, num_splits, PARTS, num_stages=1):
        parts, used = locate_parts(
            start + tl.arange(0, PARTS), head, first_part, num_splits, HEADS, GROUP
        )
        logsums = tl.load(logsum_ptr + parts, mask=used, other=float("-inf"), cache_modifier=".cg")
        places = partial_ptr + parts[:, :, None] * HEAD_DIM + dims[None, None, :]
        inside = used[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
        acc += tl.sum(partial * tl.exp2(logsums - top[None, :])[:, :, None], 0)
    places = out_ptr + head[:, None] * HEAD_DIM + dims[None, :]
    inside = (head < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(places, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def locate_parts(split, head, first_part, num_splits, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Return where the results of these splits and heads are, and which exist: [splits, heads] both."""
    used = (split < num_splits)[:, None] & (head < GROUP)[None, :]
    return first_part + split[:, None] * HEADS + head[None, :], used


def choose_num_programs(num_pairs: int, num_processors: int) -> int:
    """Return how many programs share the splits of each of num_pairs sequences and KV heads."""
    return min(-(-PROGRAMS_PER_PROCESSOR * num_processors // num_pairs), MAX_SPLITS)


def max_registers(dim_pad: int, *, is_fp8: bool) -> int | None:
    """Return how many registers a thread has at most; None leaves that to the assembler."""
    if is_fp8:
        # It takes 128 otherwise and spills some. With 144 three programs share a Hopper multiprocessor and not four.
        return 144
    # It takes 152 or 168 otherwise for heads of 256, which leaves room for 3 programs and not 4.
    return 128 if dim_pad > 128 else None


def decode_attention(
    query: Tensor,
    cache: Cache,
    batch: DecodeRows,
    arrived: Tensor,
    out: Tensor,
    num_programs: int,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
) -> None:
    """Write the attention of the batch's rows of `query` to the same rows of `out`.

    query, out: [tokens, heads, head_dim]; query's rows may lie apart, out is contiguous.
    arrived: counters, at least decodes * kv_heads int32, zero before and after. No other launch may use them meanwhile.
    scale, window, chunk, soft_cap: as AttentionFeatures has them.  sinks, slopes: [heads] float32, contiguous.
    num_programs: how many programs share the splits of a sequence and KV head; the result does not depend on it.
    split_tokens: the fewest tokens of a split.
    The splits' results take decodes * splits * heads * head_dim * 4 bytes, in float32.
    """
    key_cache, value_cache, scales = cache
    heads, head_dim = query.shape[1:]
    assert query.stride()[1:] == (head_dim, 1)
    assert out.is_contiguous()
    block_size, kv_heads = key_cache.shape[1:3]
    group, dim_pad = heads // kv_heads, pad_head_dim(head_dim)
    heads_pad = triton.next_power_of_2(group)
    num_decodes = len(batch.rows)
    assert len(arrived) >= num_decodes * kv_heads
    # in this layer a query may see little of a long context
    max_seen = min(n for n in (batch.max_context_len, window, chunk) if n is not None)
    max_own_splits = max(1, min(MAX_SPLITS, -(-max_seen // split_tokens)))
    prefixes = batch.prefixes if window is None and chunk is None else None
    max_splits = max_own_splits + (0 if prefixes is None else MAX_PREFIX_SPLITS)
    parts = (num_decodes, max_splits, heads)
    partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=query.device)
    logsum = torch.empty(parts, dtype=torch.float32, device=query.device)
    if prefixes is not None:
        attend_to_prefixes(
            query, cache, prefixes, (batch.rows, batch.context_lens, batch.block_tables), (partial, logsum),
            scale=scale, soft_cap=soft_cap, slopes=slopes,
        )  # fmt: skip
    # KV heads in the first place of the grid: neighbours in memory are read at the same time
    decode_kernel[(kv_heads, num_decodes, min(num_programs, max_own_splits))](
        out, partial, logsum, arrived, query, key_cache, value_cache, *(scales or (None, None)), sinks, slopes,
        batch.order, batch.rows, batch.context_lens, None if prefixes is None else prefixes.begins,
        batch.block_tables,
        scale * LOG2_E.value, max_splits, batch.block_tables.stride(0), query.stride(0),
        key_cache.stride(0), key_cache.stride(1),
        HEADS=heads, GROUP=group, GROUP_PAD=max(heads_pad, DOT_MIN),
        HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size,
        WINDOW=window, CHUNK=chunk, SOFT_CAP=base2_cap(soft_cap),
        TILE=tile_tokens(dim_pad, query.element_size(), DECODE_TILE_BYTES),
        SPLIT=split_tokens, MAX_SPLITS=MAX_SPLITS,
        MERGED_SPLITS=MAX_SPLITS if prefixes is None else 2 * MAX_SPLITS,
        HEADS_PAD=heads_pad, PARTS=max(MERGED_ROWS // heads_pad, 1),
        num_warps=4, num_stages=NUM_STAGES if scales is None else FP8_STAGES,
        maxnreg=max_registers(dim_pad, is_fp8=scales is not None),
    )  # fmt: skip
