"""Draws tokens in Triton as engine/sampling/draws.py does: weights, the goal of a draw, keys in the order of logits."""

import torch
import triton
import triton.language as tl

from engine.kernels import weight_constants

#: The number of zero bits in the float32 of each dtype's numbers.
SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

INFINITY = tl.constexpr(0x7F800000)  # the bits of it in float32, and so its key
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)  # a key above all others
SIGN = tl.constexpr(-(2**31))
LOG2_E_STEPS = tl.constexpr(weight_constants.LOG2_E_STEPS)
LEAST_TEMPERATURE = tl.constexpr(weight_constants.LEAST_TEMPERATURE)
LOWEST_EXPONENT = tl.constexpr(weight_constants.LOWEST_EXPONENT)
MANTISSA = tl.constexpr(weight_constants.MANTISSA)
EXPONENT = tl.constexpr(weight_constants.EXPONENT)
ONE = tl.constexpr(weight_constants.ONE)
C5, C4, C3, C2, C1, C0 = (tl.constexpr(value) for value in weight_constants.COEFFICIENTS)


@triton.jit
def ordered_key(logits, SPARE: tl.constexpr):
    """Return int32 keys in the order of the float32 logits; NaN is above all. SPARE: of SPARE_BITS."""
    bits = logits.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -size, size)
    return tl.where(size > INFINITY, NOT_A_NUMBER, key) >> SPARE


@triton.jit
def logit_of(key, SPARE: tl.constexpr):
    """Return the float32 logit whose `ordered_key` this is."""
    key = key << SPARE
    return tl.where(key < 0, (-key) | SIGN, key).to(tl.float32, bitcast=True)


@triton.jit
def as_float32(logits):
    """Convert loaded logits to float32.

    bfloat16 is converted by its bits: Triton's interpreter converts the smallest numbers wrongly.
    """
    if logits.dtype == tl.bfloat16:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return logits.to(tl.float32)


@triton.jit
def load_tile(row_ptr, tile, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Load a tile's token ids and logits, float32; minus infinity past the vocabulary's end."""
    ids = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
    return ids, as_float32(logits)


@triton.jit
def weigh(logits, highest, rate, least):
    """Return the weights that `weigh` of engine/sampling/draws.py returns, with 0 for those below `least`."""
    exponents = tl.maximum((logits - highest) * rate, LOWEST_EXPONENT).to(tl.int32)
    mantissas = ((exponents & MANTISSA) | ONE).to(tl.float32, bitcast=True)
    powers = (mantissas * C5 + C4) * mantissas + C3
    powers = ((powers * mantissas + C2) * mantissas + C1) * mantissas + C0
    powers = (powers.to(tl.int32, bitcast=True) + (exponents & EXPONENT)).to(
        tl.float32, bitcast=True
    )
    weights = powers.to(tl.int64)
    return tl.where(weights < least, 0, weights)


@triton.jit
def target(total, seed, position, sample_index):
    """Return the goal of a row's draw, as `target` of engine/sampling/draws.py does."""
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    word, _, _, _ = tl.philox(
        seed, low, high, sample_index.to(tl.int32), tl.zeros([], tl.int32), 10
    )
    odd = 2 * word.to(tl.int64) + 1
    return (odd * (total >> 30) + ((odd * (total & 0x3FFFFFFF)) >> 30)) >> 3
