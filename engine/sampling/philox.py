"""Philox4x32-10, the counter-based generator behind every sampled token.

One uniform for (seed, position, sample index) needs no state, so a completion does not depend on its
batch, on preemption or on the worker that ran it. Integer arithmetic only: any other implementation of
the same counter layout gives the same bits. Source: Salmon et al., Parallel random numbers: as easy as
1, 2, 3 (SC 2011); constants as in Random123.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # 32-bit values in 64-bit words, so that a product keeps its high half

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
ROUNDS = 10


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds over arrays of counters and keys; returns the four output words of each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> SHIFT) ^ c1 ^ k0, p1 & LOW, (p0 >> SHIFT) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def first_words(seed: Words, position: Words, sample_index: Words) -> Words:
    """The 32 random bits of each row; its uniform, in (0, 1), is (word + 1/2) / 2^32.

    Counter words: position low, position high, sample index, 0. Key words: seed low, seed high.
    """
    counter = (position & LOW, position >> SHIFT, sample_index & LOW, np.zeros_like(position))
    return philox4x32(counter, (seed & LOW, seed >> SHIFT))[0]
