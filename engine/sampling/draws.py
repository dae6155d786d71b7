"""The weights and random words of draws. gpu_draws.py and cpu_sampler.py compute the same ones, bit by bit."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.weight_constants import (
    COEFFICIENTS,
    EXPONENT,
    LEAST_TEMPERATURE,
    LOG2_E_STEPS,
    LOWEST_EXPONENT,
    MANTISSA,
    ONE,
)
from engine.sampling.sampling_rows import SamplingRows


def decay_rate(temperature: Tensor) -> Tensor:
    """Return the `rate` of `weigh`. temperature: float32 above 0; a temperature below 4e-32 counts as 4e-32."""
    return torch.div(LOG2_E_STEPS, temperature.clamp(min=LEAST_TEMPERATURE))


def weigh(logits: Tensor, highest: Tensor, rate: Tensor) -> Tensor:
    """Return each logit's weight, in proportion to exp((logit - highest) / temperature): [rows, vocabulary] int64.

    highest, rate: [rows, 1] float32, each row's highest logit and its `decay_rate`. The power's exponent is set bit by
    bit and its mantissa comes from a polynomial, so that every device computes the same weight.
    """
    exponents = torch.sub(logits, highest).mul_(rate).clamp_(min=LOWEST_EXPONENT).to(torch.int32)
    mantissas = exponents.bitwise_and(MANTISSA).bitwise_or_(ONE).view(torch.float32)
    first, *middle, last = COEFFICIENTS
    powers = mantissas * first
    for coefficient in middle:
        powers.add_(coefficient).mul_(mantissas)
    powers.add_(last).view(torch.int32).add_(exponents.bitwise_and_(EXPONENT))
    return powers.to(torch.int64)


def target(total: Tensor, word: Tensor) -> Tensor:
    """Return floor(u * total) for the uniform u = (word + 1/2) / 2^32. total: int64 up to 2^60; word: int64."""
    odd = 2 * word + 1
    high = total >> 30
    low = total & (2**30 - 1)
    return (odd * high + ((odd * low) >> 30)) >> 3


Words = NDArray[np.uint64]  # 32-bit values in 64-bit words, so that a product keeps its high half

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
ROUNDS = 10


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, ...]:
    """Run Philox 4x32 with its ten rounds over arrays of counters and keys; return the four output words of each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = MULTIPLIERS[0] * c0
        p1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> SHIFT) ^ c1 ^ k0, p1 & LOW, (p0 >> SHIFT) ^ c3 ^ k1, p0 & LOW
        k0 = (k0 + WEYL[0]) & LOW
        k1 = (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def first_words(seed: Words, position: Words, sample_index: Words) -> Words:
    """Return the 32 random bits of each row; its uniform, in (0, 1), is (word + 1/2) / 2^32.

    Counter words: position low, position high, sample index, 0. Key words: seed low, seed high.
    """
    counter = (position & LOW, position >> SHIFT, sample_index & LOW, np.zeros_like(position))
    return philox4x32(counter, (seed & LOW, seed >> SHIFT))[0]


def random_words(rows: SamplingRows) -> Tensor:
    """Return each row's word of Philox: [rows] int64 on their device."""
    seed, position, sample_index = (
        column.cpu().numpy().view(np.uint64)
        for column in (rows.seed, rows.position, rows.sample_index)
    )
    words = first_words(seed, position, sample_index).view(np.int64)
    return torch.from_numpy(words).to(rows.seed.device)
