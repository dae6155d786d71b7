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

from engine.kernels.upload import upload
from engine.sampling.philox import uniform
from engine.sampling.sampling_batch import SamplingBatch

# A nucleus rarely holds more tokens than this: looking at so many first saves sorting the vocabulary.
NUCLEUS_GUESS = 1024
ROWS_AT_ONCE = 64  # bounds the float64 scratch: 64 rows of 152k tokens are 78 MB


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Choose one token for each row: [samples] int64 on the logits' device; -1 where there is none to choose.

    There is none where a logit is NaN or plus infinity, or every token is banned.
    logits: [samples, vocabulary] float32, changed in place. The host waits for the device in one case only:
    rows with top_p and without top_k, whose nucleus may be wider than the candidates looked at first.
    """
    if len(batch.banned):
        logits[tuple(upload(list(batch.banned.T), logits.device))] = -torch.inf
    chosen = logits.argmax(dim=-1)  # NaN counts as the highest
    highest = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    drawn = np.flatnonzero(batch.values["temperature"] > 0)
    for start in range(0, len(drawn), ROWS_AT_ONCE):
        rows = drawn[start : start + ROWS_AT_ONCE]
        device_rows, token_ids = _draw(logits, rows, batch)
        chosen[device_rows] = token_ids
    return chosen.masked_fill_(~highest.isfinite(), -1)


def _draw(logits: Tensor, rows: NDArray[np.int64], batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Inverse CDF of the given rows. Returns the rows on the device and their token ids, [rows] int64."""
    vocab_size = logits.shape[1]
    values = batch.values[rows]
    top_k, top_p = values["top_k"], values["top_p"]
    u = uniform(values["seed"], batch.position[rows], values["sample_index"])
    cut = np.flatnonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1))
    device_rows, temperature, min_p, uniforms, cut_rows, k, p = upload(
        [rows, values["temperature"], values["min_p"], u, cut, top_k[cut], top_p[cut]], logits.device
    )
    row_logits = logits if len(rows) == len(logits) else logits[device_rows]
    scaled = (row_logits - row_logits.amax(dim=-1, keepdim=True)).div_(temperature.unsqueeze(1))
    if (values["min_p"] > 0).any():
        # exp(scaled) is the probability relative to the likeliest token's
        scaled.masked_fill_(scaled.exp() < min_p.unsqueeze(1), -torch.inf)
    if len(cut):
        num_candidates = min(vocab_size, max(NUCLEUS_GUESS, int(top_k[cut].max())))
        decided = bool((top_k[cut] > 0).all())  # the candidates hold top_k tokens, so what top_p leaves too
        scaled[cut_rows] = _top_k_top_p(scaled[cut_rows], k, p, num_candidates, decided=decided)
    cdf = scaled.exp_().cumsum(dim=-1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * cdf[:, -1:]
    return device_rows, torch.searchsorted(cdf, target, right=True).squeeze(1)


def _top_k_top_p(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int, *, decided: bool
) -> Tensor:
    """Set what top_k and top_p cut off to -inf. scaled: [rows, vocabulary], the highest of each row 0.

    Looks at the num_candidates highest of each row. Unless these are known to decide every row, the host
    waits to see which rows they do not, and those are done again with all.
    """
    ordered = scaled.topk(num_candidates, dim=-1).values
    num_kept = _count_kept(scaled, ordered, top_k, top_p)
    kept = _keep_highest(scaled, ordered, num_kept.clamp(max=num_candidates))
    if decided or num_candidates == scaled.shape[1]:
        return kept
    undecided = torch.nonzero(num_kept > num_candidates).squeeze(1)
    if len(undecided):
        rest = scaled[undecided], top_k[undecided], top_p[undecided]
        kept[undecided] = _top_k_top_p(*rest, scaled.shape[1], decided=True)
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
