"""SamplingBatch: what the sampler reads besides logits, passed as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SamplingBatch:
    """How to choose one token for each row of a step's logits, as numpy arrays of [samples].

    temperature, top_p, min_p: float32; temperature 0 is greedy.  top_k: int64, 0 is off.
    seed, sample_index, position: uint64, the counter of the row's uniform; position counts all tokens before.
    banned: for a row, the token ids that may not be chosen yet.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    sample_index: NDArray[np.uint64]
    position: NDArray[np.uint64]
    banned: dict[int, list[int]]
