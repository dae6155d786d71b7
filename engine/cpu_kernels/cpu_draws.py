"""The draws of Numba's sampler, the same as engine/sampling/draws.py, bit by bit."""

from typing import Any

import numpy as np
from numba import njit

#: Philox's constants, as in engine/sampling/draws.py, whose comments name the source.
MULTIPLIER_0, MULTIPLIER_2 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
ROUNDS = 10


@njit  # type: ignore[untyped-decorator]
def philox(seed: Any, position: Any, sample_index: Any) -> Any:
    """Return Philox's first word: first_words of engine/sampling/draws.py."""
    c0, c1, c2, c3 = position & LOW, position >> SHIFT, sample_index & LOW, np.uint64(0)
    k0, k1 = seed & LOW, seed >> SHIFT
    for _ in range(ROUNDS):
        p0, p2 = MULTIPLIER_0 * c0, MULTIPLIER_2 * c2
        c0, c1, c2, c3 = (p2 >> SHIFT) ^ c1 ^ k0, p2 & LOW, (p0 >> SHIFT) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return np.int64(c0)


@njit  # type: ignore[untyped-decorator]
def target(total: Any, word: Any) -> Any:
    """Return the goal of a draw: `target` of engine/sampling/draws.py."""
    odd = 2 * word + 1
    return (odd * (total >> 30) + ((odd * (total & 0x3FFFFFFF)) >> 30)) >> 3
