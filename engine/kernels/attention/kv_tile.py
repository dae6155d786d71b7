"""Tiles of paged keys and values, folded into a running softmax by both attention kernels.

WINDOW, CHUNK and SOFT_CAP (in base 2) are fields of AttentionFeatures. They are compiled in; None if a layer has none.
"""

import triton
import triton.language as tl
from torch import Tensor

#: LayerKVCache: keys and values [blocks, block_size, kv_heads, head_dim], contiguous; scales of FP8 numbers.
Cache = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]

MAX_HEAD_DIM = 256
# Stages of the loops over tiles. Keys and values have two buffers each, because the block ids that their
# places depend on come from the iteration before (seen in code compiled for sm_90).
NUM_STAGES = 3
# FP8 keys and values: tiles of as many tokens are half as large, and there are four buffers.
FP8_STAGES = 5
# Bytes of a tile's keys or values. Decode: both with two buffers are 32 KiB, so that five programs share a Hopper
# multiprocessor's 228 KiB, with 160 KiB on their way. Prefill: two programs beside their queries.
DECODE_TILE_BYTES = 8 * 1024
PREFILL_TILE_BYTES = 16 * 1024
DOT_MIN = 16  # the smallest side of a tl.dot operand
INTERPRETED = bool(triton.knobs.runtime.interpret)
# The interpreter's tl.dot multiplies the raw bits of bfloat16. A product of two bfloat16 numbers is exact in
# float32, so widening them there gives what a GPU gives.
WIDEN = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)
# A running maximum before the first score: finite, so that a row which sees nothing of a tile gets no NaN.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def split_length(num_seen, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Return the tokens of each split of the seen context: whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_seen, MAX_SPLITS), TILE) * TILE, SPLIT)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first token that the query at `position` sees; 0 for the -1 of an empty context."""
    first = position * 0
    if WINDOW is not None:
        first = tl.maximum(first, position - (WINDOW - 1))
    if CHUNK is not None:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def cap_scores(scores, SOFT_CAP: tl.constexpr):
    """Return SOFT_CAP * tanh(scores / SOFT_CAP), tanh to 5e-7 of itself, 1 at infinity.

    Near 0, where the quotient of exponentials cancels, Taylor's series stands in.
    """
    x = scores * (1.0 / SOFT_CAP)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0.0, -far, far)
    return SOFT_CAP * tl.where(square < 0.0625, near, far)


@triton.jit
def narrow_queries(queries, log2_scale):
    """Return queries for FP8 keys, and the scale of their scores.

    Queries in bfloat16 become float16, and each gets a scale of its own, [queries, 1]; others stay as they are.
    A GPU turns two FP8 numbers into float16 by one instruction, into bfloat16 by three. float16 holds the mantissa of
    bfloat16, but a smaller range, so each query is multiplied by a power of two: its largest number is 2**12 to 2**13.
    A query has a factor of its own, so that its result does not depend on the other queries of its tile.
    """
    if queries.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
        # the exponent of a float32 as its bits have it, 127 for 1.0; that of 2**-114 for all below
        exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 13)
        factor = ((2 * 127 + 12 - exponent) << 23).to(tl.float32, bitcast=True)
        queries = (queries.to(tl.float32) * factor[:, None]).to(tl.float16)
        log2_scale *= ((exponent - 12) << 23).to(tl.float32, bitcast=True)[:, None]
    return queries, log2_scale


@triton.jit
def load_block_ids(table_ptr, tokens, end, BLOCK_SIZE: tl.constexpr):
    """Return the block id of each of `tokens`; 0 for tokens from `end` on."""
    return tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def fold_tiles(
    queries, acc, row_max, row_sum,
    keys_ptr, values_ptr, table_ptr, begin, stop, end, first, last, log2_scale, slopes,
    block_stride, token_stride,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles from token `begin` to `stop` of a sequence and KV head; return (acc, row_max, row_sum).

    queries: [rows, DIM_PAD].  acc: [rows, DIM_PAD] float32, not yet divided by row_sum.  row_max, row_sum:
    [rows] float32, of scores in base 2.  table_ptr: the sequence's blocks.  end: no token from here on is read.
    first, last: [rows], the first and the last token each row may see; first None: all before the last.
    slopes: [rows] float32, what a score loses for each token before the last, in base 2; None without.
    Without MASKED every token is below `end` and seen by every row.  A row whose maximum is still infinite
    must see some token of a tile.  Source: FlashAttention-2, arXiv:2307.08691, section 3.1.
    """
    dims, tile = tl.arange(0, DIM_PAD), tl.arange(0, TILE)
    inside = dims < HEAD_DIM
    blocks = load_block_ids(table_ptr, begin + tile, end, BLOCK_SIZE)
    for start in tl.range(begin, stop, TILE):
        tokens = start + tile
        next_blocks = load_block_ids(table_ptr, tokens + TILE, end, BLOCK_SIZE)
        # int64: a pool of 2^31 elements is only 4 GiB
        offsets = blocks.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * token_stride
        places = offsets[:, None] + dims[None, :]
        if MASKED:
            # a slot that was never written may hold NaN, and 0 * NaN is NaN: load zeros instead
            read = (tokens < end)[:, None] & inside[None, :]
            keys = tl.load(keys_ptr + places, mask=read, other=0.0)
            values = tl.load(values_ptr + places, mask=read, other=0.0)
        elif DIM_PAD != HEAD_DIM:
            keys = tl.load(keys_ptr + places, mask=inside[None, :], other=0.0)
            values = tl.load(values_ptr + places, mask=inside[None, :], other=0.0)
        else:
            keys = tl.load(keys_ptr + places)
            values = tl.load(values_ptr + places)
        # FP8 numbers are exact in every dtype of queries, as the scales are applied to sums
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        left = queries
        if WIDEN:
            left, keys = queries.to(tl.float32), keys.to(tl.float32)
        # "ieee" keeps float32 products in float32; tf32 has 10 bits of mantissa
        scores = tl.dot(left, tl.trans(keys), input_precision="ieee") * log2_scale
        if SOFT_CAP is not None:
            scores = cap_scores(scores, SOFT_CAP)
        if slopes is not None:
            scores -= slopes[:, None] * (last[:, None] - tokens[None, :])
        if MASKED:
            seen = (tokens[None, :] <= last[:, None]) & (tokens < end)[None, :]
            if first is not None:
                seen &= tokens[None, :] >= first[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        weights = weights.to(values.dtype)
        if WIDEN:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        acc = acc * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
        row_max, blocks = new_max, next_blocks
    return acc, row_max, row_sum


def base2_cap(soft_cap: float | None) -> float | None:
    """Convert a layer's soft cap to the kernels' SOFT_CAP, which is in base 2."""
    return None if soft_cap is None else soft_cap * LOG2_E.value


def tile_tokens(dim_pad: int, itemsize: int, tile_bytes: int) -> int:
    """Return how many tokens a tile has, 16 to 128, so that its keys take tile_bytes.

    In float32 it is always 16: larger tiles spill registers on sm_90.
    """
    if INTERPRETED:
        return 128  # the interpreter takes its time for each operation, whatever its size
    if itemsize == 4:
        return DOT_MIN
    return min(max(tile_bytes // (dim_pad * itemsize), DOT_MIN), 128)


def pad_head_dim(head_dim: int) -> int:
    """Return the power of two that a head is padded to; padding is neither read nor written."""
    return max(int(triton.next_power_of_2(head_dim)), DOT_MIN)
