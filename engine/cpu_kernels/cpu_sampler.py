"""Chooses the same tokens as engine/sampling/sampler.py. It reads a row once for its highest logit, twice for a draw.

All decisions are made with integers: weights as in engine/sampling/draws.py, and keys, which are ordered as the
logits are. Cuts by top_k and top_p sort nothing. One more pass counts tokens, or sums their weights, in 1,313 ranges of
weights. Another pass collects the tokens of the range in which the cut lies, and a search among their keys finds it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, int64
from torch import Tensor

from engine.cpu_kernels.kernel import ELEMENTS, Kernel, next_task, worker_number
from engine.cpu_kernels.scalars import helper, pointer_to, row_pointer, wide
from engine.cpu_kernels.token_weights import exponent, ordered_key, weight
from engine.kernels import weight_constants

TILE = 128  # tokens whose highest key, and whose sum, are kept together
INFINITY = 0x7F800000  # its bits, and so its key
LOWEST_KEY = -(2**31) + 1  # below all
RANGE_BITS = 18  # of an exponent: ranges of a factor of 2^(1/32)
# Every range. It is no plain integer: Numba would compile another variant of the function for that.
EVERY = np.int64(-1)
NUM_RANGES = (-int(weight_constants.LOWEST_EXPONENT) >> RANGE_BITS) + 1
LOG2_E_STEPS = np.float32(weight_constants.LOG2_E_STEPS)
LEAST_TEMPERATURE = np.float32(weight_constants.LEAST_TEMPERATURE)
WHOLE = np.float32(weight_constants.WHOLE)
#: Philox's constants, as in engine/sampling/draws.py, whose comments name the source.
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_2 = np.uint64(0xCD9E8D57)
WEYL_0 = np.uint64(0x9E3779B9)
WEYL_1 = np.uint64(0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
ROUNDS = 10


def choose_tokens(logits: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Choose one token for each row: [rows] int64, -1 where there is none to choose.

    logits: [rows, vocabulary] float32 or bfloat16; rows may lie apart, the numbers of a row are adjacent.
    values: the fields of SamplingRows.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert vocab_size <= weight_constants.MAX_VOCAB_SIZE
    chosen = torch.empty(num_rows, dtype=torch.int64)
    words = _scratch_words(vocab_size)
    scratch = torch.empty(min(num_rows, torch.get_num_threads()) * words, dtype=torch.int64)
    kernel_for(logits.dtype)(
        num_rows, logits, logits.stride(0), vocab_size, *values, chosen, scratch, words
    )
    return chosen


def _scratch_words(vocab_size: int) -> int:
    """Count one thread's scratch words of 8 bytes."""
    return 2 * -(-vocab_size // TILE) + NUM_RANGES + 3 * TILE + 3 * vocab_size


@helper()
def _philox(seed: Any, position: Any, sample_index: Any) -> Any:
    """Return the first word of Philox, as `first_words` of engine/sampling/draws.py does."""
    c0, c1, c2, c3 = position & LOW, position >> SHIFT, sample_index & LOW, np.uint64(0)
    k0, k1 = seed & LOW, seed >> SHIFT
    for _ in range(ROUNDS):
        p0, p2 = MULTIPLIER_0 * c0, MULTIPLIER_2 * c2
        c0, c1, c2, c3 = (p2 >> SHIFT) ^ c1 ^ k0, p2 & LOW, (p0 >> SHIFT) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return np.int64(c0)


@helper()
def _target(total: Any, word: Any) -> Any:
    """Return the goal of a draw, as `target` of engine/sampling/draws.py does."""
    odd = 2 * word + 1
    return (odd * (total >> 30) + ((odd * (total & 0x3FFFFFFF)) >> 30)) >> 3


@helper()
def _tile_of(row: Any, tile: Any, element: Any) -> Any:
    """Return a tile's logits as an array, so that LLVM makes vector code of loops. row: its address and its length."""
    address, vocab = row
    first = tile * TILE
    return carray(row_pointer(address, first, 1, element), (min(TILE, vocab - first),))


@helper()
def _highest(row: Any, maxima: Any, element: Any) -> Any:
    """Return the row's highest key and the first tile with it. Put every tile's highest key into maxima."""
    highest, where = np.int32(LOWEST_KEY), 0
    for tile in range(len(maxima)):
        best = np.int32(LOWEST_KEY)
        logits = _tile_of(row, tile, element)
        for i in range(len(logits)):
            best = max(best, ordered_key(wide(logits[i])))
        maxima[tile] = best
        if best > highest:
            highest, where = best, tile
    return highest, where


@helper(error_model="numpy")
def _sum_tiles(row: Any, maxima: Any, sums: Any, scale: Any, cut: Any, element: Any) -> Any:
    """Return the sum of the weights that stay, and put each tile's sum into sums.

    cut: the lowest key that stays, and the last token with this key that stays.
    """
    highest, rate, least = scale
    lowest, last_id = cut
    total = 0
    for tile in range(len(sums)):
        part, first = 0, tile * TILE
        logits = _tile_of(row, tile, element)
        if lowest == LOWEST_KEY:
            for i in range(len(logits)):
                amount = weight(exponent(wide(logits[i]), highest, rate))
                part += amount if amount >= least else 0
        elif maxima[tile] >= lowest:
            for i in range(len(logits)):
                key = ordered_key(wide(logits[i]))
                amount = weight(exponent(wide(logits[i]), highest, rate))
                part += amount if (amount >= least) & _stays(key, first + i, lowest, last_id) else 0
        sums[tile] = part
        total += part
    return total


@helper()
def _stays(key: Any, token: Any, lowest: Any, last_id: Any) -> Any:
    return (key > lowest) | ((key == lowest) & (token <= last_id))


@helper(error_model="numpy")
def _sum_ranges(
    row: Any, maxima: Any, ranges: Any, tile_of: Any, found: Any, wanted: Any, scale: Any, cut: Any,
    counts: Any, element: Any,
) -> Any:  # fmt: skip
    """Sum the tokens that stay by range and return the total, or collect those of range `wanted` and return how many.

    counts: each token counts as 1, otherwise as its weight.
    """
    highest, rate, least = scale
    lowest, last_id = cut
    places, keys, amounts = tile_of
    total = 0
    for tile in range(len(maxima)):
        if maxima[tile] < lowest:
            continue
        logits, first, number = _tile_of(row, tile, element), tile * TILE, 0
        for i in range(len(logits)):
            key = ordered_key(wide(logits[i]))
            steps = exponent(wide(logits[i]), highest, rate)
            amount = weight(steps)
            amount = amount if (amount >= least) & _stays(key, first + i, lowest, last_id) else 0
            place = -steps >> RANGE_BITS
            places[i], keys[i], amounts[i] = place, key, min(amount, 1) if counts else amount
            number += place == wanted
        if wanted < 0:
            for i in range(len(logits)):
                ranges[places[i]] += amounts[i]
                total += amounts[i]
        elif number:
            for i in range(len(logits)):
                if places[i] == wanted and amounts[i] > 0:
                    found[0][total], found[1][total], found[2][total] = (
                        first + i,
                        keys[i],
                        amounts[i],
                    )
                    total += 1
    return total


@helper(error_model="numpy")
def _cut_at(found: Any, number: Any, above: Any, goal: Any) -> Any:
    """Return the key and token at which the sum reaches the goal. above: the sum of all higher ranges."""
    ids, keys, amounts = found
    low, high = np.int64(LOWEST_KEY), np.int64(INFINITY)
    # the highest key with which the tokens from this key on reach the goal
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = above
        for i in range(number):
            reached += amounts[i] if keys[i] >= middle else 0
        if reached >= goal:
            low = middle
        else:
            high = middle - 1
    for i in range(number):
        above += amounts[i] if keys[i] > low else 0
    last_id = np.int64(0)
    # tokens with just this key stay only until the goal is reached
    for i in range(number):
        if keys[i] == low and above < goal:
            above += amounts[i]
            last_id = ids[i]
    return np.int32(low), last_id


@helper()
def _share(total: Any, top_p: Any) -> Any:
    """Return the sum that top_p keeps of a total, as `share` of engine/sampling/sampler.py does."""
    fraction = np.int64(top_p * np.float32(2**31))
    return max(fraction * (total >> 31) + ((fraction * (total & 0x7FFFFFFF)) >> 31), 1)


@helper(error_model="numpy")
def _reached_at(row: Any, sums: Any, goal: Any, scale: Any, cut: Any, element: Any) -> Any:
    """Return the first token at which the sum of the weights that stay exceeds the goal."""
    highest, rate, least = scale
    reached, tile = 0, 0
    while tile < len(sums) - 1 and reached + sums[tile] <= goal:
        reached += sums[tile]
        tile += 1
    logits, first = _tile_of(row, tile, element), tile * TILE
    for i in range(len(logits)):
        amount = weight(exponent(wide(logits[i]), highest, rate))
        if amount >= least and _stays(ordered_key(wide(logits[i])), first + i, cut[0], cut[1]):
            reached += amount
        if reached > goal:
            return first + i
    return np.int64(-1)


@cache
def kernel_for(dtype: torch.dtype) -> Kernel:
    """Compile or load the kernel for logits of that dtype."""
    element = ELEMENTS[dtype]
    element_bytes = dtype.itemsize

    def sample(parameters: Any) -> None:
        stride, vocab = parameters[4], parameters[5]
        temperature, top_p = pointer_to(parameters[6], float32), pointer_to(parameters[7], float32)
        min_p, top_k = pointer_to(parameters[8], float32), pointer_to(parameters[9], int32)
        seed, index = pointer_to(parameters[10], int64), pointer_to(parameters[11], int64)
        position, chosen = pointer_to(parameters[12], int64), pointer_to(parameters[13], int64)
        num_tiles = (vocab + TILE - 1) // TILE
        at = parameters[14] + worker_number(parameters) * parameters[15] * 8
        sums = carray(pointer_to(at, int64), (num_tiles,))
        maxima = carray(pointer_to(at + num_tiles * 8, int32), (num_tiles,))
        at += num_tiles * 16
        ranges = carray(pointer_to(at, int64), (NUM_RANGES,))
        at += NUM_RANGES * 8
        tile_of = (
            carray(pointer_to(at, int32), (TILE,)),
            carray(pointer_to(at + TILE * 8, int32), (TILE,)),
            carray(pointer_to(at + TILE * 16, int64), (TILE,)),
        )
        at += TILE * 24
        found = (
            carray(pointer_to(at, int64), (vocab,)),
            carray(pointer_to(at + vocab * 8, int32), (vocab,)),
            carray(pointer_to(at + vocab * 16, int64), (vocab,)),
        )
        task = next_task(parameters)
        while task >= 0:
            row = (parameters[3] + task * stride * element_bytes, vocab)
            highest_key, tile = _highest(row, maxima, element)
            chosen[task] = -1
            if -INFINITY < highest_key < INFINITY:
                # without a draw: the first token with the highest logit
                logits, first = _tile_of(row, tile, element), 0
                while ordered_key(wide(logits[first])) != highest_key:
                    first += 1
                chosen[task] = tile * TILE + first
                if temperature[task] > 0:
                    rate = LOG2_E_STEPS / max(temperature[task], LEAST_TEMPERATURE)
                    scale = (wide(logits[first]), rate, np.int64(min_p[task] * WHOLE))
                    cut = (np.int32(LOWEST_KEY), np.int64(vocab))
                    for by_weight in range(2):  # first the cut by top_k, then the cut by top_p
                        counts = by_weight == 0
                        if not (0 < top_k[task] < vocab if counts else top_p[task] < 1):
                            continue
                        # the cut is in the first range with which the sum of ranges reaches the goal
                        for i in range(NUM_RANGES):
                            ranges[i] = 0
                        total = _sum_ranges(
                            row, maxima, ranges, tile_of, found, EVERY, scale, cut, counts, element
                        )
                        goal = np.int64(top_k[task]) if counts else _share(total, top_p[task])
                        if goal < total:
                            above, wanted = 0, 0
                            while above + ranges[wanted] < goal:
                                above += ranges[wanted]
                                wanted += 1
                            number = _sum_ranges(
                                row,
                                maxima,
                                ranges,
                                tile_of,
                                found,
                                wanted,
                                scale,
                                cut,
                                counts,
                                element,
                            )
                            cut = _cut_at(found, number, above, goal)
                    total = _sum_tiles(row, maxima, sums, scale, cut, element)
                    word = _philox(
                        np.uint64(seed[task]), np.uint64(position[task]), np.uint64(index[task])
                    )
                    chosen[task] = _reached_at(row, sums, _target(total, word), scale, cut, element)
            task = next_task(parameters)

    return Kernel(sample)
