"""Keys and weights of tokens. They have 32 bits where Numba would take 64, so that LLVM makes vector code."""

from typing import Any

from numba import types

from engine.cpu_kernels.scalars import F32, FLOAT32, I32, I64, emitted
from engine.kernels.weight_constants import COEFFICIENTS, EXPONENT, LOWEST_EXPONENT, MANTISSA, ONE

INFINITY = 0x7F800000
NOT_A_NUMBER = 0x7FFFFFFF


@emitted(types.int32(FLOAT32))
def ordered_key(builder: Any, logit: Any) -> Any:
    """Return a float32 logit's key, int32: keys are ordered as the logits are, and the key of NaN is the highest."""
    bits = builder.bitcast(logit, I32)
    size = builder.and_(bits, I32(0x7FFFFFFF))
    is_negative = builder.icmp_signed("<", bits, I32(0))
    key = builder.select(is_negative, builder.neg(size), size)
    return builder.select(builder.icmp_signed(">", size, I32(INFINITY)), I32(NOT_A_NUMBER), key)


@emitted(types.int32(FLOAT32, FLOAT32, FLOAT32))
def exponent(builder: Any, logit: Any, highest: Any, rate: Any) -> Any:
    """Return a logit's exponent, int32, as `weigh` of engine/sampling/draws.py does. No logit is above highest."""
    steps = builder.fmul(builder.fsub(logit, highest), rate)
    least = F32(LOWEST_EXPONENT)
    return builder.fptosi(
        builder.select(builder.fcmp_ordered(">", steps, least), steps, least), I32
    )


@emitted(types.int64(types.int32))
def weight(builder: Any, exponent: Any) -> Any:
    """Return the weight, int64, of an exponent, as `weigh` does. Each operation is rounded: none are fused."""
    # a polynomial of a number from 1 to 2, the mantissa; then the exponent's bits are added
    bits = builder.or_(builder.and_(exponent, I32(MANTISSA)), I32(ONE))
    mantissa = builder.bitcast(bits, F32)
    first, *others, last = (F32(number) for number in COEFFICIENTS)
    power = builder.fmul(mantissa, first)
    for coefficient in others:
        power = builder.fmul(builder.fadd(power, coefficient), mantissa)
    bits = builder.bitcast(builder.fadd(power, last), I32)
    scaled = builder.add(bits, builder.and_(exponent, I32(EXPONENT)))
    return builder.fptosi(builder.bitcast(scaled, F32), I64)
