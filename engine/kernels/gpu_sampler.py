"""The sampler as Triton kernels: two launches for a batch, whatever its parameters, and no wait for the device.

It chooses the same tokens as engine/sampling/sampler.py: both sum the same integer weights, so no order of tiles or
threads can move a choice. The pair can be recorded in a CUDA graph.

A row of logits is read once for tile maxima, once to be drawn, once with top_p, and up to 9 times for the
threshold of top_k or top_p: a pass sums the row above three thresholds, which settles two bits of a logit, and
skips tiles that lie below all three.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import weight_constants
from engine.kernels.gpu_draws import (
    INFINITY,
    LEAST_TEMPERATURE,
    LOG2_E_STEPS,
    LOWEST_EXPONENT,
    NOT_A_NUMBER,
    SPARE_BITS,
    load_tile,
    logit_of,
    ordered_key,
    target,
    weigh,
)
from engine.kernels.gpu_kind import GpuKind, kind_of

TILE = 4096
VALUE_PASSES = tl.constexpr(4)
WHOLE = tl.constexpr(float(weight_constants.WHOLE))


@triton.jit
def find_threshold(
    row_ptr, maxima_ptr, highest_key, highest, rate, least, goal, is_count,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Return the highest key whose tokens reach the goal together with all tokens above, and the sum of those above.

    The goal is a number of tokens if `is_count`, else a weight. If all tokens together miss it, the key is that of
    minus infinity.
    """
    # below this all weights are 0; a step lower, as the sum is rounded
    lightest = ordered_key(highest + 1.01 * LOWEST_EXPONENT / rate, 0) - 1
    low = (tl.maximum(lightest, -INFINITY) >> SPARE).to(tl.int64)
    high = highest_key.to(tl.int64) + 1
    above = tl.zeros([], tl.int64)
    passes = 0
    while high - low > 1:
        # quarters of the range: first of values, which are spread evenly, then of the bits that are left
        quarter = tl.maximum((high - low) >> 2, 1)
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        if passes < VALUE_PASSES:
            lower = logit_of(low.to(tl.int32), SPARE)
            step = (highest - lower) * 0.25
            first = ordered_key(lower + step, SPARE).to(tl.int64)
            second = ordered_key(lower + 2 * step, SPARE).to(tl.int64)
            third = ordered_key(lower + 3 * step, SPARE).to(tl.int64)
        passes += 1
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high)
        third = tl.minimum(tl.maximum(third, second), high)
        key1, key2, key3 = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        sums1 = tl.zeros([TILE], tl.int64)
        sums2 = tl.zeros([TILE], tl.int64)
        sums3 = tl.zeros([TILE], tl.int64)
        for tile in tl.range(0, TILES):
            if tl.load(maxima_ptr + tile) >= key1:
                _, logits = load_tile(row_ptr, tile, VOCAB, TILE)
                keys = ordered_key(logits, SPARE)
                weights = weigh(logits, highest, rate, least)
                amounts = tl.where(is_count, (weights > 0).to(tl.int64), weights)
                sums1 += tl.where(keys >= key1, amounts, 0)
                sums2 += tl.where(keys >= key2, amounts, 0)
                sums3 += tl.where(keys >= key3, amounts, 0)
        sum1, sum2, sum3 = tl.sum(sums1, 0), tl.sum(sums2, 0), tl.sum(sums3, 0)
        above = tl.where(
            sum1 < goal, sum1, tl.where(sum2 < goal, sum2, tl.where(sum3 < goal, sum3, above))
        )
        high = tl.where(
            sum1 < goal, first, tl.where(sum2 < goal, second, tl.where(sum3 < goal, third, high))
        )
        low = tl.where(
            sum3 >= goal, third, tl.where(sum2 >= goal, second, tl.where(sum1 >= goal, first, low))
        )
    return low.to(tl.int32), above


@triton.jit
def last_id_of_equals(
    row_ptr, maxima_ptr, key, room, VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    SPARE: tl.constexpr,
):  # fmt: skip
    """Return the id of the last token that stays of those with the key, if `room` of them stay.

    The vocabulary's size, if there are no more than `room`.
    """
    seen = tl.zeros([], tl.int64)
    last_id = VOCAB + tl.zeros([], tl.int32)
    for tile in tl.range(0, TILES):
        if (tl.load(maxima_ptr + tile) >= key) & (seen < room):
            ids, logits = load_tile(row_ptr, tile, VOCAB, TILE)
            equal = ordered_key(logits, SPARE) == key
            ranks = seen + tl.cumsum(equal.to(tl.int64), 0)
            last_id = tl.min(tl.where(equal & (ranks == room), ids, last_id), 0)
            seen += tl.sum(equal.to(tl.int64), 0)
    return last_id


@triton.jit
def staying_weights(logits, ids, highest, rate, least, lowest, last_id):
    """Return the weights of the tokens that stay, 0 for the others.

    Tokens stay whose logits are above `lowest`, and those with equal logits up to token `last_id`.
    """
    stays = (logits > lowest) | ((logits == lowest) & (ids <= last_id))
    return tl.where(stays, weigh(logits, highest, rate, least), 0)


@triton.jit
def sum_tiles(
    row_ptr, maxima_ptr, highest, rate, least, lowest, last_id,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, TILE: tl.constexpr,
    SPARE: tl.constexpr,
):  # fmt: skip
    """Return the sum of each tile's weights, without those that are cut: [TILES_PAD] int64."""
    places = tl.arange(0, TILES_PAD)
    sums = tl.zeros([TILES_PAD], tl.int64)
    lowest_key = ordered_key(lowest, SPARE)
    if lowest == float("-inf"):  # no tile is skipped, so that the next ones are loaded ahead
        for tile in tl.range(0, TILES, num_stages=3):
            _, logits = load_tile(row_ptr, tile, VOCAB, TILE)
            sums = tl.where(places == tile, tl.sum(weigh(logits, highest, rate, least), 0), sums)
    else:
        for tile in tl.range(0, TILES):
            if tl.load(maxima_ptr + tile) >= lowest_key:
                ids, logits = load_tile(row_ptr, tile, VOCAB, TILE)
                weights = staying_weights(logits, ids, highest, rate, least, lowest, last_id)
                sums = tl.where(places == tile, tl.sum(weights, 0), sums)
    return sums


@triton.jit
def share(total, top_p):
    """Return floor(top_p total), 1 at least, in the integers that `share` of engine/sampling/sampler.py uses."""
    fraction = (top_p * 2147483648.0).to(tl.int64)
    return tl.maximum(fraction * (total >> 31) + ((fraction * (total & 0x7FFFFFFF)) >> 31), 1)


@triton.jit
def tile_maxima_kernel(
    maxima_ptr, logits_ptr, row_stride, VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    SPARE: tl.constexpr,
):  # fmt: skip
    """Program (row, tile): the tile's highest key."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, logits = load_tile(logits_ptr + row * row_stride, tile, VOCAB, TILE)
    tl.store(maxima_ptr + row * TILES + tile, tl.max(ordered_key(logits, SPARE), 0))


@triton.jit
def choose_token_kernel(
    chosen_ptr, logits_ptr, maxima_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seed_ptr,
    sample_index_ptr, position_ptr, row_stride,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, TILE: tl.constexpr,
    SPARE: tl.constexpr,
):  # fmt: skip
    """Program (row): choose the row's token."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    maxima_ptr += row * TILES
    places = tl.arange(0, TILES_PAD)
    maxima = tl.load(maxima_ptr + places, mask=places < TILES, other=-NOT_A_NUMBER)
    highest_key = tl.max(maxima, 0)
    temperature = tl.load(temperature_ptr + row)
    chosen = tl.full([], -1, tl.int32)
    if (highest_key < (INFINITY >> SPARE)) & (highest_key > -(INFINITY >> SPARE)):
        if temperature > 0:
            highest = logit_of(highest_key, SPARE)
            rate = tl.div_rn(
                tl.full([], LOG2_E_STEPS, tl.float32), tl.maximum(temperature, LEAST_TEMPERATURE)
            )
            least = (tl.load(min_p_ptr + row) * WHOLE).to(tl.int64)
            top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            lowest = tl.full([], float("-inf"), tl.float32)
            last_id = tl.full([], VOCAB, tl.int32)
            if (top_k > 0) & (top_k < VOCAB):
                goal = top_k.to(tl.int64)
                key, above = find_threshold(
                    row_ptr, maxima_ptr, highest_key, highest, rate, least, goal, True,
                    VOCAB, TILES, TILE, SPARE,
                )  # fmt: skip
                last_id = last_id_of_equals(
                    row_ptr, maxima_ptr, key, goal - above, VOCAB, TILES, TILE, SPARE
                )
                lowest = logit_of(key, SPARE)
            sums = sum_tiles(
                row_ptr, maxima_ptr, highest, rate, least, lowest, last_id,
                VOCAB, TILES, TILES_PAD, TILE, SPARE,
            )  # fmt: skip
            if top_p < 1:
                goal = share(tl.sum(sums, 0), top_p)
                key, above = find_threshold(
                    row_ptr, maxima_ptr, highest_key, highest, rate, least, goal, False,
                    VOCAB, TILES, TILE, SPARE,
                )  # fmt: skip
                lowest = logit_of(key, SPARE)
                weight = weigh(lowest, highest, rate, least)
                room = (goal - above + weight - 1) // weight
                last_id = last_id_of_equals(
                    row_ptr, maxima_ptr, key, room, VOCAB, TILES, TILE, SPARE
                )
                sums = sum_tiles(
                    row_ptr, maxima_ptr, highest, rate, least, lowest, last_id,
                VOCAB, TILES, TILES_PAD, TILE, SPARE,
                )  # fmt: skip
            goal = target(
                tl.sum(sums, 0), tl.load(seed_ptr + row), tl.load(position_ptr + row),
                tl.load(sample_index_ptr + row),
            )  # fmt: skip
            is_before = tl.cumsum(sums, 0) <= goal
            tile = tl.sum(is_before.to(tl.int32), 0)
            ids, logits = load_tile(row_ptr, tile, VOCAB, TILE)
            weights = staying_weights(logits, ids, highest, rate, least, lowest, last_id)
            reached = tl.sum(tl.where(is_before, sums, 0), 0) + tl.cumsum(weights, 0)
            chosen = tile * TILE + tl.sum((reached <= goal).to(tl.int32), 0)
        else:
            tile = tl.min(tl.where(maxima == highest_key, places, TILES), 0)
            ids, logits = load_tile(row_ptr, tile, VOCAB, TILE)
            chosen = tl.min(tl.where(ordered_key(logits, SPARE) == highest_key, ids, VOCAB), 0)
    tl.store(chosen_ptr + row, chosen.to(tl.int64))


def max_warps(kind: GpuKind) -> int:
    """Return the most warps that a program may have.

    With 16 warps a thread has 128 registers, and on sm_120 the kernel needs a few more.
    """
    return 8 if kind.major == 12 else 16


def choose_tokens(
    logits: Tensor, values: Sequence[Tensor], *, chosen: Tensor | None = None, tile: int = TILE
) -> Tensor:
    """Choose one token for each row: [rows] int64, -1 where there is none to choose.

    logits: [rows, vocabulary] bfloat16, float16 or float32; rows may lie apart.
    values: the fields of SamplingRows, in their order.  chosen: a tensor to write the tokens to.
    """
    num_rows, vocab_size = logits.shape
    if chosen is None:
        chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1
    assert all(each.is_contiguous() for each in (*values, chosen))
    assert vocab_size <= weight_constants.MAX_VOCAB_SIZE
    if not num_rows:
        return chosen
    num_tiles = triton.cdiv(vocab_size, tile)
    maxima = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    sizes = {
        "VOCAB": vocab_size,
        "TILES": num_tiles,
        "TILE": tile,
        "SPARE": SPARE_BITS[logits.dtype],
    }
    # 8 logits, 16 bytes of bfloat16, for each thread
    warps = min(max(tile // 256, 1), max_warps(kind_of(logits.device)))
    tile_maxima_kernel[(num_rows, num_tiles)](
        maxima, logits, logits.stride(0), **sizes, num_warps=warps // 4 or 1
    )
    choose_token_kernel[(num_rows,)](
        chosen, logits, maxima, *values, logits.stride(0),
        **sizes, TILES_PAD=triton.next_power_of_2(num_tiles), num_warps=warps,
        enable_fp_fusion=False,  # products and sums round by themselves, as in torch
    )  # fmt: skip
    return chosen
