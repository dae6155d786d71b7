"""Attention of prompts in tiles whose queries may belong to several sequences behind a common prefix.

A program first attends to the tokens that all its queries see, which are most often the common prefix. It does so for
all its queries at once. Then it goes through its segments, the queries of one sequence each, and attends to what that
sequence has behind those tokens. The softmax runs on in registers, so there are no partial results to merge.
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
)
from engine.kernels.attention.prefill import (
    QUERY_TILE,
    TWO_HEADS_WARPS,
    heads_of_program,
    prefill_shape,
)
from engine.kernels.attention.prefix import MAX_REGISTERS, PREFIX_TILE
from engine.kernels.gpu_kind import kind_of


@dataclass(frozen=True)
class SharedTiles:
    """All queries of a step's prompts in tiles of up to QUERY_TILE, on the device.

    num_shared: [tiles] int32, how many tokens all queries of a tile see: a multiple of PREFIX_TILE.
    first_segments: [tiles + 1] int32, where each tile's segments begin, and where those of the last tile end.
    segments: [segments, 3] int32, a sequence, its first row in the tile, and the row after its last. A tile's
        sequences have the shared tokens in the same blocks.
    rows: [tiles, QUERY_TILE] int32, the rows of the step's queries; -1 where a tile has none.
    positions: [tiles, QUERY_TILE] int32, each query's place in its sequence, which is the last token that it sees; -1
        where a tile has none.
    block_tables: [seqs, blocks] int32.
    """

    num_shared: Tensor
    first_segments: Tensor
    segments: Tensor
    rows: Tensor
    positions: Tensor
    block_tables: Tensor


@triton.jit(do_not_specialize=["table_stride"])
def shared_prefill_kernel(
    out_ptr, query_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, slopes_ptr,
    num_shared_ptr, first_segments_ptr, segments_ptr, rows_ptr, positions_ptr, tables_ptr,
    log2_scale, table_stride, query_stride, block_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr, QUERY_TILE: tl.constexpr, HEADS_TILE: tl.constexpr,
):  # fmt: skip
    """Program (HEADS_TILE heads of one KV head, tile of queries).

    Its rows are the tile's queries of the first head, then those of the second one.
    """
    first_head = tl.program_id(0) * HEADS_TILE
    query_tile = tl.program_id(1)
    row_of_program = tl.arange(0, HEADS_TILE * QUERY_TILE)
    head = first_head + row_of_program // QUERY_TILE
    row_of_tile = row_of_program % QUERY_TILE
    dims = tl.arange(0, DIM_PAD)
    rows_ptr += query_tile * QUERY_TILE
    positions_ptr += query_tile * QUERY_TILE
    rows = tl.load(rows_ptr + row_of_tile).to(tl.int64)
    last_seen = tl.load(positions_ptr + row_of_tile)
    inside = (rows >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    places = query_ptr + rows[:, None] * query_stride + head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(places, mask=inside, other=0.0)

    kv_head = first_head // GROUP
    keys_ptr += kv_head * HEAD_DIM
    values_ptr += kv_head * HEAD_DIM
    if key_scales_ptr is not None:
        log2_scale *= tl.load(key_scales_ptr + kv_head)
        if DIM_PAD <= 128:  # with wider heads this spills registers on Hopper
            queries, log2_scale = narrow_queries(queries, log2_scale)

    acc = tl.zeros([HEADS_TILE * QUERY_TILE, DIM_PAD], tl.float32)
    row_max = tl.full([HEADS_TILE * QUERY_TILE], LOWEST, tl.float32)
    row_sum = tl.zeros([HEADS_TILE * QUERY_TILE], tl.float32)
    if sinks_ptr is not None:  # a score without a value
        row_max = tl.load(sinks_ptr + head) * LOG2_E
        row_sum += 1.0
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head) * LOG2_E

    num_shared = tl.load(num_shared_ptr + query_tile)
    first_segment = tl.load(first_segments_ptr + query_tile)
    end_segment = tl.load(first_segments_ptr + query_tile + 1)
    first_seq = tl.load(segments_ptr + 3 * first_segment).to(tl.int64)
    acc, row_max, row_sum = fold_tiles(
        queries, acc, row_max, row_sum, keys_ptr, values_ptr, tables_ptr + first_seq * table_stride,
        0, num_shared, num_shared, None, last_seen, log2_scale, slopes, block_stride, token_stride,
        HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, TILE, False,
    )  # fmt: skip
    for segment in tl.range(first_segment, end_segment, num_stages=1):
        seq = tl.load(segments_ptr + 3 * segment).to(tl.int64)
        begin_row = tl.load(segments_ptr + 3 * segment + 1)
        end_row = tl.load(segments_ptr + 3 * segment + 2)
        end = tl.load(positions_ptr + end_row - 1) + 1
        # the other rows see nothing of this sequence, which leaves their sums as they are
        is_of_segment = (row_of_tile >= begin_row) & (row_of_tile < end_row)
        # loaded again, so that no registers hold them through the prefix
        last_seen_here = tl.load(positions_ptr + row_of_tile, mask=is_of_segment, other=-1)
        acc, row_max, row_sum = fold_tiles(
            queries, acc, row_max, row_sum, keys_ptr, values_ptr, tables_ptr + seq * table_stride,
            num_shared, end, end, None, last_seen_here, log2_scale, slopes, block_stride, token_stride,
            HEAD_DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, TILE, True,
        )  # fmt: skip
    # loaded again, so that no registers hold them through the loops
    rows = tl.load(rows_ptr + row_of_tile, volatile=True).to(tl.int64)
    inside = (rows >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    places = out_ptr + (rows[:, None] * HEADS + head[:, None]) * HEAD_DIM + dims[None, :]
    row_sum = tl.where(rows >= 0, row_sum, 1.0)  # a row without a query may have seen nothing
    result = acc / row_sum[:, None]
    if value_scales_ptr is not None:
        result *= tl.load(value_scales_ptr + kv_head)
    tl.store(places, result.to(out_ptr.dtype.element_ty), mask=inside)


def shared_prefill_attention(
    query: Tensor,
    cache: Cache,
    tiles: SharedTiles,
    out: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Write the attention of the tiles' rows of `query` to the same rows of `out`.

    The layer has no window and no chunk.

    query, out, scale, soft_cap, sinks, slopes: as prefill_attention has them.
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
    tile = min(shape.tile, PREFIX_TILE)
    if gpu.has_tensor_memory:
        # behind the prefix each score is masked, and on these GPUs that spills with larger tiles
        tile = max(tile // 2, DOT_MIN)
    max_registers = shape.max_registers
    if scales is None:
        # left to itself, the assembler makes room for another program, and spills
        max_registers = min(MAX_REGISTERS // (32 * num_warps), 255)
    shared_prefill_kernel[(heads // heads_tile, len(tiles.num_shared))](
        out, query, key_cache, value_cache, *(scales or (None, None)), sinks, slopes,
        tiles.num_shared, tiles.first_segments, tiles.segments, tiles.rows, tiles.positions, tiles.block_tables,
        scale * LOG2_E.value, tiles.block_tables.stride(0), query.stride(0),
        key_cache.stride(0), key_cache.stride(1),
        HEADS=heads, GROUP=group, HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size,
        SOFT_CAP=base2_cap(soft_cap),
        TILE=tile, QUERY_TILE=QUERY_TILE, HEADS_TILE=heads_tile,
        num_warps=num_warps, num_stages=shape.num_stages,
        maxnreg=max_registers,
    )  # fmt: skip
