"""exp, tanh and softmax, written so that LLVM makes vector code of them."""

from typing import Any

import numpy as np

from engine.cpu_kernels.scalars import F32, FLOAT32, I32, emitted, helper

LOWEST = -86.0  # exp of less is no normal float32 any more
LOG2_E = 1.44269504
LN2 = (0.693359375, -2.12194440e-4)  # in two parts, so that a multiple of the first is exact
EXP_POWERS = (
    0.0083124777,
    0.041890551,
    0.16667116,
    0.49999228,
    1.0,
    1.0,
)  # least error from -ln(2) / 2 to that
LEAST = np.float32(-3.4e38)
ONE = np.float32(1.0)


def emit_exp(builder: Any, x: Any, floats: Any, integers: Any) -> Any:
    """Emit exp(x) for x of 0 or less, a float32 or a vector, 2e-7 relative: 2 ** n times exp of the rest.

    floats, integers: functions that make constants of x's type, and of integers of the same width.
    """

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    lowest = floats(LOWEST)
    x = builder.select(builder.fcmp_ordered(">", lowest, x), lowest, x)  # NaN stays
    bits = integers(0).type
    # the nearest integer, as fptosi cuts towards 0
    whole = builder.fptosi(multiply_add(x, floats(LOG2_E), floats(-0.5)), bits)
    n = builder.sitofp(whole, x.type)
    rest = x
    for part in LN2:
        rest = multiply_add(n, floats(-part), rest)
    power = floats(EXP_POWERS[0])
    for each in EXP_POWERS[1:]:
        power = multiply_add(power, rest, floats(each))
    exponent = builder.shl(whole, integers(23))
    return builder.bitcast(builder.add(builder.bitcast(power, bits), exponent), x.type)


@emitted(FLOAT32(FLOAT32))
def exp_of_negative(builder: Any, x: Any) -> Any:
    """exp(x) for a float32 x of 0 or less."""
    return emit_exp(builder, x, F32, I32)


@helper(fastmath={"contract", "nsz"}, error_model="numpy")
def tanh(x: Any) -> Any:
    """tanh(x) for a float32 x, 1e-7 relative. Source: Cephes' tanhf."""
    size = abs(x)
    small = exp_of_negative(np.float32(-2) * size)
    far = (ONE - small) / (ONE + small)
    square = x * x
    power = np.float32(-5.70498872745e-3)
    power = power * square + np.float32(2.06390887954e-2)
    power = power * square - np.float32(5.37397155531e-2)
    power = power * square + np.float32(1.33314422036e-1)
    power = power * square - np.float32(3.33332819422e-1)
    near = power * square * x + x  # where 1 - small would keep few digits
    return near if size < np.float32(0.625) else np.copysign(far, x)


@helper(error_model="numpy")
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) for a float32 x, 1e-7 relative."""
    small = exp_of_negative(-abs(x))
    return (ONE if x >= 0 else small) / (ONE + small)


@helper(fastmath=True)
def softmax_numerators(scores: Any, scale: Any, least: Any) -> Any:
    """Replace each score by exp(scale * (score - the highest)); return their sum and the highest.

    least: a lower bound of the highest; LEAST if nothing else takes part in the softmax.
    """
    highest = least
    for i in range(len(scores)):
        highest = max(highest, scores[i])
    total = np.float32(0)
    for i in range(len(scores)):
        weight = exp_of_negative((scores[i] - highest) * scale)
        scores[i] = weight
        total += weight
    return total, highest
