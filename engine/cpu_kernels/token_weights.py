"""Keys and weights of tokens, for LLVM to make vector code of: 32 bits wide where Numba would take 64."""

from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu_kernels.scalars import F32, FLOAT32, I32, I64
from engine.kernels.weight_constants import COEFFICIENTS, EXPONENT, LOWEST_EXPONENT, MANTISSA, ONE

INFINITY, NOT_A_NUMBER = 0x7F800000, 0x7FFFFFFF


@intrinsic  # type: ignore[untyped-decorator]
def ordered_key(typing: Any, logit: Any) -> Any:
    """Return an int32 key in the order of the logits, float32; NaN is above all."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        size = builder.and_(bits, I32(0x7FFFFFFF))
        is_negative = builder.icmp_signed("<", bits, I32(0))
        key = builder.select(is_negative, builder.neg(size), size)
        return builder.select(builder.icmp_signed(">", size, I32(INFINITY)), I32(NOT_A_NUMBER), key)

    return types.int32(FLOAT32), generate


@intrinsic  # type: ignore[untyped-decorator]
def exponent(typing: Any, logit: Any, highest: Any, rate: Any) -> Any:
    """Return the exponents of `weigh` of engine/sampling/draws.py, int32. No logit is above highest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        steps = builder.fmul(builder.fsub(args[0], args[1]), args[2])
        least = F32(LOWEST_EXPONENT)
        return builder.fptosi(builder.select(builder.fcmp_ordered(">", steps, least), steps, least), I32)

    return types.int32(FLOAT32, FLOAT32, FLOAT32), generate


@intrinsic  # type: ignore[untyped-decorator]
def weight(typing: Any, exponent: Any) -> Any:
    """Return the weight, int64, of an exponent: the rest of `weigh`, each operation rounded alone."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.or_(builder.and_(args[0], I32(MANTISSA)), I32(ONE))
        mantissa = builder.bitcast(bits, F32)
        first, *others, last = (F32(number) for number in COEFFICIENTS)
        power = builder.fmul(mantissa, first)
        for coefficient in others:
            power = builder.fmul(builder.fadd(power, coefficient), mantissa)
        bits = builder.bitcast(builder.fadd(power, last), I32)
        scaled = builder.add(bits, builder.and_(args[0], I32(EXPONENT)))
        return builder.fptosi(builder.bitcast(scaled, F32), I64)

    return types.int64(types.int32), generate
