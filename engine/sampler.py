"""Sampler: logits to token ids, each row by its own parameters and its own Philox uniform.

A row's choice is the inverse of its cumulative distribution in token-id order. The cuts min_p, top_k and
top_p, in this order, each keep the most probable tokens; where a cut falls among equal logits, the lower
token ids stay. So a row's result is a function of its logits, parameters and uniform alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import SamplingBatch
from engine.philox import uniform

# A nucleus rarely holds more tokens than this: looking at so many first saves sorting the vocabulary.
NUCLEUS_GUESS = 1024
ROWS_AT_ONCE = 64  # bounds the float64 scratch: 64 rows of 152k tokens are 78 MB


def sample(logits: Tensor, batch: SamplingBatch) -> NDArray[np.int64]:
    """Choose one token for each row. logits: [samples, vocabulary] float32, changed in place."""
    for row, token_ids in batch.banned.items():
        logits[row, token_ids] = -torch.inf
    chosen = logits.argmax(dim=-1).cpu().numpy()
    drawn = np.flatnonzero(batch.temperature > 0)
    if len(drawn):
        u = uniform(batch.seed, batch.position, batch.sample_index)
        for start in range(0, len(drawn), ROWS_AT_ONCE):
            rows = drawn[start : start + ROWS_AT_ONCE]
            chosen[rows] = _draw(logits, rows, u[rows], batch).cpu().numpy()
    return chosen


def _draw(logits: Tensor, rows: NDArray[np.int64], u: NDArray[np.float64], batch: SamplingBatch) -> Tensor:
    """Inverse CDF of the given rows. Returns token ids [rows] int64."""

    def to_device(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    row_logits = logits if len(rows) == len(logits) else logits[to_device(rows)]
    top = row_logits.amax(dim=-1, keepdim=True)
    scaled = (row_logits - top).div_(to_device(batch.temperature[rows]).unsqueeze(1))
    min_p, top_k, top_p = batch.min_p[rows], batch.top_k[rows], batch.top_p[rows]
    if (min_p > 0).any():
        # exp(scaled) is the probability relative to the likeliest token's
        scaled.masked_fill_(scaled.exp() < to_device(min_p).unsqueeze(1), -torch.inf)
    cut = np.flatnonzero(((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1))
    if len(cut):
        scaled_cut, k, p = scaled[to_device(cut)], to_device(top_k[cut]), to_device(top_p[cut])
        num_candidates = min(scaled.shape[1], max(NUCLEUS_GUESS, int(k.max())))
        scaled[to_device(cut)] = _top_k_top_p(scaled_cut, k, p, num_candidates)
    cdf = scaled.exp_().cumsum(dim=-1, dtype=torch.float64)
    target = to_device(u).unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def _top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int) -> Tensor:
    """Set what top_k and top_p cut off to -inf. scaled: [rows, vocabulary], the highest of each row 0.

    Looks at the num_candidates highest of each row; rows these do not decide are done again with all.
    """
    ordered = scaled.topk(num_candidates, dim=-1).values
    num_kept = _count_kept(scaled, ordered, top_k, top_p)
    undecided = torch.nonzero(num_kept > num_candidates).squeeze(1)
    kept = _keep_highest(scaled, ordered, num_kept.clamp(max=num_candidates))
    if len(undecided):
        rest = scaled[undecided], top_k[undecided], top_p[undecided]
        kept[undecided] = _top_k_top_p(*rest, scaled.shape[1])
    return kept


def _count_kept(scaled: Tensor, ordered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """How many tokens of each row stay; more than `ordered` has, if that does not tell."""
    vocab_size, num_candidates = scaled.shape[1], ordered.shape[1]
    cdf = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    mass_of_k = cdf.gather(1, (limit.clamp(max=num_candidates) - 1).unsqueeze(1)).squeeze(1)
    mass = torch.where(top_k > 0, mass_of_k, scaled.exp().sum(dim=-1, dtype=torch.float64))
    # the token that reaches top_p of the mass stays: count those before it and add one
    nucleus = (cdf < (top_p.double() * mass).unsqueeze(1)).sum(dim=-1) + 1
    return torch.minimum(limit, torch.where(top_p < 1, nucleus, vocab_size))


def _keep_highest(scaled: Tensor, ordered: Tensor, num_kept: Tensor) -> Tensor:
    """Keep the num_kept highest of each row, the lower token ids among equals; -inf elsewhere."""
    last = ordered.gather(1, (num_kept - 1).unsqueeze(1))
    num_above = (ordered > last).sum(dim=-1, keepdim=True)
    equal = scaled == last
    equal &= equal.cumsum(dim=-1) <= num_kept.unsqueeze(1) - num_above
    return scaled.masked_fill(~(equal | (scaled > last)), -torch.inf)
