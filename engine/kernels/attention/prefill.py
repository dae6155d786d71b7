"""Causal attention of prompts, or of a prompt's next chunk, to themselves and all tokens before in the paged cache.

Source: FlashAttention-2, arXiv:2307.08691, over the blocks of PagedAttention, arXiv:2309.06180.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.kv_tile import (
    DOT_MIN,
    INTERPRETED,
    LOG2_E,
    LOWEST,
    NUM_STAGES,
    PREFILL_TILE_BYTES,
    Cache,
    base2_cap,
    first_seen,
    fold_tiles,
    narrow_queries,
    pad_head_dim,
    tile_tokens,
)
from engine.kernels.gpu_kind import GpuKind, kind_of

QUERY_TILE = 64  # the rows of one warp group's matrix instruction on Hopper
TWO_HEADS_WARPS = 8  # two warp groups, one for each head


@dataclass(frozen=True)
class PrefillTiles:
    """The prefilling sequences of a step, their queries cut into tiles of QUERY_TILE, on the device.

    seqs, starts: [tiles] int32, each tile's sequence and the first of its queries.
    query_ranges: [seqs, 2] int32, each sequence's first row in the queries, and the row after its last.
    context_lens: [seqs] int32, the step's own tokens included.  block_tables: [seqs, blocks] int32.
    """

    seqs: Tensor
    starts: Tensor
    query_ranges: Tensor
    context_lens: Tensor
    block_tables: Tensor


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out_ptr, query_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, slopes_ptr,
    tile_seqs_ptr, tile_starts_ptr, query_ranges_ptr, context_lens_ptr, tables_ptr,
    log2_scale, table_stride, query_stride, block_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr, QUERY_TILE: tl.constexpr, HEADS_TILE: tl.constexpr,
):  # fmt: skip
    """Program (HEADS_TILE heads of one KV head, tile of queries).

    Its rows are the tile's queries of the first head, then those of the second one.
    """
    first_head = tl.program_id(0) * HEADS_TILE
    query_tile = tl.program_id(1)
    seq = tl.load(tile_seqs_ptr + query_tile).to(tl.int64)
    tile_start = tl.load(tile_starts_ptr + query_tile)
    first_row = tl.load(query_ranges_ptr + 2 * seq)
    num_queries = tl.load(query_ranges_ptr + 2 * seq + 1) - first_row
    context_len = tl.load(context_lens_ptr + seq)

    row_of_tile = tl.arange(0, HEADS_TILE * QUERY_TILE)
    head = first_head + row_of_tile // QUERY_TILE
    query = tile_start + row_of_tile % QUERY_TILE
    dims = tl.arange(0, DIM_PAD)
    inside = (query < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (first_row + query).to(tl.int64)
    places = query_ptr + rows[:, None] * query_stride + head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(places, mask=inside, other=0.0)

    # query i is token context_len - num_queries + i and sees the tokens up to itself
    first_token = context_len - num_queries + tile_start
    last_seen = context_len - num_queries + query
    end = tl.minimum(first_token + QUERY_TILE, context_len)
    # tiles count from the first token that any query sees, so that no token before it is read
    begin = 0
    begin_of_unmasked = 0
    first_seens = None
    if WINDOW is not None or CHUNK is not None:
        # rows past the last query see what that query sees, because a row has to see some token
        first_seens = first_seen(tl.minimum(last_seen, context_len - 1), WINDOW, CHUNK)
        begin = first_seen(first_token, WINDOW, CHUNK)
        begin_of_unmasked = begin + tl.cdiv(first_seen(end - 1, WINDOW, CHUNK) - begin, TILE) * TILE
    end_of_unmasked = begin + (first_token + 1 - begin) // TILE * TILE
    kv_head = first_head // GROUP
    keys_ptr += kv_head * HEAD_DIM
    values_ptr += kv_head * HEAD_DIM
    if key_scales_ptr is not None:
        log2_scale *= tl.load(key_scales_ptr + kv_head)
        if DIM_PAD <= 128:  # with wider heads this spills registers on Hopper
            queries, log2_scale = narrow_queries(queries, log2_scale)
    tables_ptr += seq * table_stride

    acc = tl.zeros([HEADS_TILE * QUERY_TILE, DIM_PAD], tl.float32)
    row_max = tl.full([HEADS_TILE * QUERY_TILE], LOWEST, tl.float32)
    row_sum = tl.zeros([HEADS_TILE * QUERY_TILE], tl.float32)
    if sinks_ptr is not None:  # a score without a value
        row_max = tl.load(sinks_ptr + head) * LOG2_E
        row_sum += 1.0
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head) * LOG2_E
    if first_seens is not None:
        acc, row_max, row_sum = fold_tiles(
            queries, acc, row_max, row_sum, keys_ptr, values_ptr, tables_ptr,
            begin, begin_of_unmasked, end, first_seens, last_seen, log2_scale, slopes, block_stride, token_stride,
            HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, TILE, True,
        )  # fmt: skip
        end_of_unmasked = tl.maximum(begin_of_unmasked, end_of_unmasked)
    acc, row_max, row_sum = fold_tiles(
        queries, acc, row_max, row_sum, keys_ptr, values_ptr, tables_ptr,
        begin_of_unmasked, end_of_unmasked, end, None, last_seen, log2_scale, slopes, block_stride, token_stride,
        HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, TILE, False,
    )  # fmt: skip
    acc, row_max, row_sum = fold_tiles(
        queries, acc, row_max, row_sum, keys_ptr, values_ptr, tables_ptr,
        end_of_unmasked, end, end, None, last_seen, log2_scale, slopes, block_stride, token_stride,
        HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, TILE, True,
    )  # fmt: skip
    places = out_ptr + (rows[:, None] * HEADS + head[:, None]) * HEAD_DIM + dims[None, :]
    result = acc / row_sum[:, None]
    if value_scales_ptr is not None:
        result *= tl.load(value_scales_ptr + kv_head)
    tl.store(places, result.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PrefillShape:
    """The size of a program. tile: how many tokens' keys and values it reads at once."""

    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None


def prefill_shape(dim_pad: int, itemsize: int, gpu: GpuKind) -> PrefillShape:
    """Return a shape that fits into a GPU's shared memory and registers. itemsize: bytes of a query's number."""
    tile = tile_tokens(dim_pad, itemsize, PREFILL_TILE_BYTES)
    # GPUs for desktops have no more than 99 KiB for a program. Keys and values go through registers there.
    is_small = not (gpu.has_warp_groups or gpu.has_tensor_memory)
    if itemsize == 4:
        # Products of float32 are made in registers; with fewer warps these spill. Left to itself, the assembler gives
        # 16 warps few registers and spills some.
        num_stages = 1 if is_small and dim_pad > 128 else 2
        return PrefillShape(tile, num_warps=16, num_stages=num_stages, max_registers=128)

    # The accumulator has 64 * head_dim numbers in float32. With heads of 128, each of 128 threads has 64 of them.
    num_warps = 8 if dim_pad > 128 or (dim_pad == 128 and gpu.has_tensor_memory) else 4
    if is_small and not INTERPRETED:
        tile = max(tile // 2, DOT_MIN)
    # Left to itself, the assembler gives heads of 256 only 128 registers on data-center Blackwell, and spills.
    max_registers = 168 if dim_pad > 128 and gpu.has_tensor_memory else None
    return PrefillShape(tile, num_warps, NUM_STAGES, max_registers)


def heads_of_program(group: int, dim_pad: int, itemsize: int, gpu: GpuKind) -> int:
    """Return how many query heads share the keys and values that a program reads: 1 or 2.

    With one head, a byte of keys and values serves 64 operations. A Hopper's L2 cache delivers about 5.5 TB/s, enough
    for 45 % of what its products could compute. With two heads, a byte serves 128 operations. GPUs with slower products
    are not held up by their caches, and have room for more programs of one head.

    group: query heads of a KV head. dim_pad: a head's padded size. itemsize: bytes of a query's number.
    """
    has_fast_products = gpu.has_warp_groups or gpu.has_tensor_memory
    has_registers = dim_pad <= 128 and itemsize < 4
    return 2 if has_fast_products and has_registers and group % 2 == 0 else 1


def prefill_attention(
    query: Tensor,
    cache: Cache,
    batch: PrefillTiles,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Write the attention of the tiles' rows of `query` to the same rows of `out`.

    query, out: [tokens, heads, head_dim]; query's rows may lie apart, out is contiguous.
    scale, window, chunk, soft_cap: as AttentionFeatures has them.  sinks, slopes: [heads] float32, contiguous.
    """
    key_cache, value_cache, scales = cache
    heads, head_dim = query.shape[1:]
    assert query.stride()[1:] == (head_dim, 1)
    assert out.is_contiguous()
    block_size, kv_heads = key_cache.shape[1:3]
    dim_pad = pad_head_dim(head_dim)
    gpu = kind_of(query.device)
    shape = prefill_shape(dim_pad, query.element_size(), gpu)
    group = heads // kv_heads
    heads_tile = heads_of_program(group, dim_pad, query.element_size(), gpu)
    num_warps = shape.num_warps if heads_tile == 1 else TWO_HEADS_WARPS
    # heads in the first place of the grid: those of one group read the same keys at the same time
    prefill_kernel[(heads // heads_tile, len(batch.seqs))](
        out, query, key_cache, value_cache, *(scales or (None, None)), sinks, slopes,
        batch.seqs, batch.starts, batch.query_ranges, batch.context_lens, batch.block_tables,
        scale * LOG2_E.value, batch.block_tables.stride(0), query.stride(0),
        key_cache.stride(0), key_cache.stride(1),
        HEADS=heads, GROUP=group, HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size,
        WINDOW=window, CHUNK=chunk, SOFT_CAP=base2_cap(soft_cap),
        TILE=shape.tile, QUERY_TILE=QUERY_TILE, HEADS_TILE=heads_tile,
        num_warps=num_warps, num_stages=shape.num_stages, maxnreg=shape.max_registers,
    )  # fmt: skip
