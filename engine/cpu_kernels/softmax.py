"""exp, tanh and softmax, written so that LLVM makes vector code of them."""

from typing import Any

import numpy as np

from engine.cpu_kernels.scalars import helper, power_of_two

LOWEST = np.float32(-87.0)  # exp of less is no normal float32 any more
LOG2_E = np.float32(1.44269504)
LN2_HIGH = np.float32(0.693359375)  # ln 2 in two parts, so that a multiple of it is exact
LN2_LOW = np.float32(-2.12194440e-4)
LEAST = np.float32(-3.4e38)
HALF, ONE = np.float32(0.5), np.float32(1.0)


@helper(fastmath={"contract", "nsz"})
def exp_of_negative(x: Any) -> Any:
    """exp(x) for a float32 x of 0 or less, 1e-7 relative. Source: Cephes' expf."""
    x = max(x, LOWEST)
    exponent = np.int32(x * LOG2_E - HALF)
    rest = x - np.float32(exponent) * LN2_HIGH - np.float32(exponent) * LN2_LOW
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + HALF
    return (power * rest * rest + rest + ONE) * power_of_two(exponent)


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
