"""Pooling of a step's hidden states, on their device: a vector for each sequence that has rows in it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.upload import upload


def pool(
    hidden: Tensor, counts: NDArray[np.int64], positions: NDArray[np.int64], modes: tuple[str, ...]
) -> Tensor:
    """[seqs, modes * hidden] float32: what the rows of each sequence add to its vectors.

    hidden: [rows, hidden], final states, those of a sequence one after another.  counts: [seqs] int64, how
    many of each.  positions: [rows] int64, each row's place in its sequence.
    """
    ends = np.cumsum(counts)
    firsts, lasts, weights = upload([ends - counts, ends - 1, positions + 1], hidden.device)
    parts = torch.tensor_split(hidden, ends[:-1].tolist())
    pooled = []
    for mode in modes:
        if mode == "lasttoken":
            pooled.append(hidden[lasts].float())
        elif mode == "cls":
            pooled.append(hidden[firsts].float())
        elif mode == "max":
            pooled.append(torch.stack([part.amax(0) for part in parts]).float())
        elif mode == "weightedmean":
            own = torch.tensor_split(weights[:, None].float(), ends[:-1].tolist())
            pooled.append(torch.stack([(part * w).sum(0) for part, w in zip(parts, own, strict=True)]))
        else:
            pooled.append(torch.stack([part.sum(0, dtype=torch.float32) for part in parts]))
    return torch.cat(pooled, dim=1)
