"""Integer weights of tokens: a distribution whose sums are exact, whatever the order they are taken in.

A token's probability is its weight over the sum of its row's weights:

    weight = floor(2^40 2^((logit - highest logit) log2(e) / temperature))

to a relative 1e-6, below which tokens of 2^-40 of the likeliest one's probability have weight 0. Each step is
one IEEE operation on float32 or on integers, never two that a compiler fuses, so that any implementation gets
the same bits: Triton's is in engine/kernels/sampler.py. In a row, a higher logit never weighs less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.token_weights import (
    COEFFICIENTS,
    EXPONENT,
    LEAST_TEMPERATURE,
    LOG2_E_STEPS,
    LOWEST_EXPONENT,
    MANTISSA,
    ONE,
    WHOLE,
)


def decay_rate(temperature: Tensor) -> Tensor:
    """What `weigh` multiplies logits by. temperature: float32 above 0; below 4e-32 it counts as that."""
    return torch.div(LOG2_E_STEPS, temperature.clamp(min=LEAST_TEMPERATURE))


def weigh(logits: Tensor, highest: Tensor, rate: Tensor) -> Tensor:
    """Weights of logits, int64. highest, rate: [rows, 1] float32; no logit of a row is above its highest."""
    exponents = torch.sub(logits, highest).mul_(rate).clamp_(min=LOWEST_EXPONENT).to(torch.int32)
    mantissas = exponents.bitwise_and(MANTISSA).bitwise_or_(ONE).view(torch.float32)
    first, *others, last = COEFFICIENTS
    powers = mantissas * first
    for coefficient in others:
        powers.add_(coefficient).mul_(mantissas)
    powers.add_(last).view(torch.int32).add_(exponents.bitwise_and_(EXPONENT))
    return powers.to(torch.int64)


def least_weight(min_p: Tensor) -> Tensor:
    """The least weight that min_p keeps: [rows] int64."""
    return torch.mul(min_p, WHOLE).to(torch.int64)


def share(total: Tensor, top_p: Tensor) -> Tensor:
    """floor(top_p total), top_p cut to 31 bits, and 1 at least. total: int64 up to 2^60."""
    fraction = (top_p * 2.0**31).to(torch.int64)
    high, low = total >> 31, total & (2**31 - 1)
    return (fraction * high + ((fraction * low) >> 31)).clamp_(min=1)


def target(total: Tensor, word: Tensor) -> Tensor:
    """floor(u total) for the uniform u = (word + 1/2) / 2^32. total: int64 up to 2^60; word: int64."""
    odd = 2 * word + 1
    high, low = total >> 30, total & (2**30 - 1)
    return (odd * high + ((odd * low) >> 30)) >> 3
