"""Sampler: logits to token ids, each row by its own parameters and its own Philox uniform.

A row's choice is the inverse of its cumulative distribution in token-id order, over integer weights
(`weights`), so it is exact. The cuts min_p, top_k and top_p, in this order, each keep the most probable tokens;
of equal logits the lower token ids stay. So a row's result depends only on its logits, parameters and uniform.

This is the reference, in plain torch; on a GPU it makes the host wait. The kernels of
engine/kernels/gpu_sampler.py and engine/cpu_kernels/cpu_sampler.py choose the same tokens.
"""

import torch
from torch import Tensor

from engine.kernels.weight_constants import MAX_VOCAB_SIZE, WHOLE
from engine.sampling.draws import decay_rate, random_words, target, weigh
from engine.sampling.sampling_rows import SamplingRows


def share(total: Tensor, top_p: Tensor) -> Tensor:
    """Return floor(top_p * total), but at least 1. top_p counts with 31 bits. total: int64 up to 2^60."""
    fraction = (top_p * 2.0**31).to(torch.int64)
    high = total >> 31
    low = total & (2**31 - 1)
    return (fraction * high + ((fraction * low) >> 31)).clamp_(min=1)


NUCLEUS_GUESS = 1024  # a nucleus rarely holds more tokens: looking at these first saves sorting all
ROWS_AT_ONCE = 64  # bounds the scratch: 64 rows of 152k tokens take 78 MB, several times over
TILE = 128  # tokens of which the highest logit is found first


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token for each row: [rows] int64 on the logits' device.

    -1 if a logit is NaN or plus infinity, or every token is banned.
    logits: [rows, vocabulary], of any floating dtype; at most MAX_VOCAB_SIZE tokens.
    """
    assert logits.shape[1] <= MAX_VOCAB_SIZE
    highest, chosen = first_highest(logits)
    has_choice = highest.isfinite()
    drawn = (has_choice & (rows.temperature > 0)).nonzero().squeeze(1)
    for places in torch.split(drawn, ROWS_AT_ONCE):
        chosen[places] = draw(logits[places].float(), highest[places], rows.only(places))
    return chosen.masked_fill_(~has_choice, -1)


def first_highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's highest logit, float32, and the lowest token id that has it, int64. NaN counts as the highest.

    The maximum of each tile of logits is taken first: this is ten times as fast as one maximum of the whole row.
    """
    vocab_size = logits.shape[1]
    whole = vocab_size - vocab_size % TILE
    maxima = logits[:, :whole].reshape(len(logits), whole // TILE, TILE).amax(-1)
    if whole < vocab_size:
        maxima = torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), 1)
    highest, tile = maxima.float().max(-1)
    ids = tile.unsqueeze(1) * TILE + torch.arange(TILE, device=tile.device)
    ids.clamp_(max=vocab_size - 1)
    place = logits.gather(1, ids).float().argmax(-1, keepdim=True)
    return highest, ids.gather(1, place).squeeze(1)


def draw(logits: Tensor, highest: Tensor, rows: SamplingRows) -> Tensor:
    """Return each row's first token whose cumulative weight exceeds the row's uniform times the total: [rows] int64.

    logits: [rows, vocabulary] float32.  highest: [rows] float32, of each row.
    """
    weights = weigh(logits, highest.unsqueeze(1), decay_rate(rows.temperature).unsqueeze(1))
    least = torch.mul(rows.min_p, WHOLE).to(torch.int64)  # weight that min_p keeps
    weights.masked_fill_(weights < least.unsqueeze(1), 0)
    is_cut = ((rows.top_k > 0) & (rows.top_k < logits.shape[1])) | (rows.top_p < 1)
    places = is_cut.nonzero().squeeze(1)
    if len(places):
        weights[places] = cut(weights[places], logits[places], rows.only(places))
    ends = weights.cumsum(-1)
    return (ends <= target(ends[:, -1:], random_words(rows).unsqueeze(1))).sum(-1)


def cut(
    weights: Tensor, logits: Tensor, rows: SamplingRows, num_candidates: int = NUCLEUS_GUESS
) -> Tensor:
    """Return the weights, with 0 for each token that top_k or top_p excludes.

    It looks only at the num_candidates or top_k highest logits. If a row's top_p needs more, it looks at all of them.
    """
    vocab_size = logits.shape[1]
    top_k = rows.top_k.long()
    top_p = rows.top_p
    num_candidates = min(vocab_size, max(num_candidates, int(top_k.max())))
    ordered, ids = logits.topk(num_candidates, dim=-1)
    # [rows, candidates]: the weight of a candidate and of all more likely ones
    ends = weights.gather(1, ids).cumsum(-1)
    # [rows]: how many tokens top_k keeps
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size)
    last = (limit.clamp(max=num_candidates) - 1).unsqueeze(1)
    total = torch.where(top_k > 0, ends.gather(1, last).squeeze(1), weights.sum(-1))
    # the token that reaches top_p of the weight stays: count those before it and add one
    nucleus = (ends < share(total, top_p).unsqueeze(1)).sum(-1) + 1
    num_kept = torch.minimum(limit, torch.where(top_p < 1, nucleus, vocab_size))
    if bool((num_kept > num_candidates).any()):
        return cut(weights, logits, rows, vocab_size)
    lowest = ordered.gather(1, (num_kept - 1).unsqueeze(1))
    room = num_kept - (ordered > lowest).sum(-1)
    equal = logits == lowest  # of these the lower token ids stay
    stays = (logits > lowest) | (equal & (equal.cumsum(-1) <= room.unsqueeze(1)))
    return weights.masked_fill(~stays, 0)
