"""Sampler: logits to token ids, each row by its own parameters and its own Philox uniform.

A row's choice is the inverse of its cumulative distribution in token-id order, over integer weights
(`weights`), so that it is exact. The cuts min_p, top_k and top_p, in this order, each keep the most probable
tokens; where a cut falls among equal logits, the lower token ids stay. So a row's result is a function of its
logits, parameters and uniform alone.

This is the reference, in plain torch. On a GPU it waits for the device; there the two launches of
engine/kernels/sampler.py choose the same tokens and do not. On a CPU engine/cpu_kernels/sampler.py chooses
them and sorts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.token_weights import (
    COEFFICIENTS,
    EXPONENT,
    LEAST_TEMPERATURE,
    LOG2_E_STEPS,
    LOWEST_EXPONENT,
    MANTISSA,
    MAX_VOCAB_SIZE,
    ONE,
    WHOLE,
)
from engine.sampling.sampling_rows import SamplingRows


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


# A nucleus rarely holds more tokens than this: looking at so many first saves sorting the vocabulary.
NUCLEUS_GUESS = 1024
CUT_ROWS_AT_ONCE = 64  # bounds the scratch of sorting: 64 rows of 152k tokens are 78 MB and more
TILE = 128  # tokens whose highest logit, and whose sum, are looked at together
WEIGHTS_AT_ONCE = 2**17  # about what a core's cache holds while they are computed


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token for each row: [rows] int64 on the logits' device; -1 where there is none to choose.

    There is none where a logit is NaN or plus infinity, or every token is banned.
    logits: [rows, vocabulary], of any floating dtype; at most MAX_VOCAB_SIZE tokens.
    """
    vocab_size = logits.shape[1]
    assert vocab_size <= MAX_VOCAB_SIZE
    highest, chosen = first_highest(logits)
    is_one = highest.isfinite()
    is_drawn = is_one & (rows.temperature > 0)
    is_cut = is_drawn & (((rows.top_k > 0) & (rows.top_k < vocab_size)) | (rows.top_p < 1))
    for group, at_once in ((is_drawn & ~is_cut, max(1, len(logits))), (is_cut, CUT_ROWS_AT_ONCE)):
        places = group.nonzero().squeeze(1)
        for start in range(0, len(places), at_once):
            drawn = Drawn(logits, highest, rows, places[start : start + at_once])
            chosen[drawn.places] = pick(drawn, find_cut(drawn) if group is is_cut else None)
    return chosen.masked_fill_(~is_one, -1)


def first_highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's highest logit, float32, and its lowest token id, int64; NaN counts as the highest.

    By tiles: torch finds a maximum ten times faster than its place.
    """
    vocab_size = logits.shape[1]
    whole = vocab_size - vocab_size % TILE
    maxima = logits[:, :whole].reshape(len(logits), whole // TILE, TILE).amax(-1)
    if whole < vocab_size:
        maxima = torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), 1)
    highest, tile = maxima.float().max(-1)
    ids = ids_of(tile, vocab_size)
    place = logits.gather(1, ids).float().argmax(-1, keepdim=True)
    return highest, ids.gather(1, place).squeeze(1)


def ids_of(tile: Tensor, vocab_size: int) -> Tensor:
    """Token ids of each row's tile: [rows, TILE]; where the vocabulary has ended its last one."""
    ids = tile.unsqueeze(1) * TILE + torch.arange(TILE, device=tile.device)
    return ids.clamp_(max=vocab_size - 1)


@dataclass(frozen=True)
class Cut:
    """What top_k and top_p leave of each row: logits above `lowest`, and equal ones up to token `last_id`.

    Both [rows, 1], float32 and int64.
    """

    lowest: Tensor
    last_id: Tensor


class Drawn:
    """Rows of the logits that are drawn, and what weighs them."""

    def __init__(self, logits: Tensor, highest: Tensor, rows: SamplingRows, places: Tensor) -> None:
        """highest: [rows] float32, each row's highest logit.  places: [drawn] int64, which of the rows."""
        self._all_logits, self._all_highest, self._all_rows = logits, highest, rows
        self.places, self.vocab_size = places, logits.shape[1]
        self.rows = rows.only(places)
        self._highest = highest[places].unsqueeze(1)
        self._rate = decay_rate(self.rows.temperature).unsqueeze(1)
        self._least = least_weight(self.rows.min_p).unsqueeze(1)
        self._has_least = bool((self._least > 0).any())

    def only(self, which: Tensor) -> Drawn:
        """Return some of the drawn rows. which: [some] int64."""
        return Drawn(self._all_logits, self._all_highest, self._all_rows, self.places[which])

    def logits(self, start: int, stop: int) -> Tensor:
        """Return the logits of tokens start to stop, [drawn, tokens]."""
        tokens = self._all_logits[:, start:stop]
        return tokens if len(self.places) == len(tokens) else tokens[self.places]

    def logits_at(self, ids: Tensor) -> Tensor:
        """ids: [drawn, tokens] int64, of each row's own."""
        return self._all_logits[self.places.unsqueeze(1), ids]

    def weigh(self, logits: Tensor) -> Tensor:
        """Weights of such logits, 0 where min_p cuts them off."""
        weights = weigh(logits, self._highest, self._rate)
        return weights.masked_fill_(weights < self._least, 0) if self._has_least else weights

    def tile_sums(self, cut: Cut | None = None) -> Tensor:
        """Sums of the weights that stay, over tiles of TILE tokens: [drawn, tiles] int64."""
        whole = self.vocab_size - self.vocab_size % TILE
        width = TILE * max(1, WEIGHTS_AT_ONCE // (TILE * len(self.places)))
        sums = []
        for start in [*range(0, whole, width), *range(whole, self.vocab_size, TILE)]:
            stop = min(start + width, whole if start < whole else self.vocab_size)
            logits = self.logits(start, stop)
            weights = self.weigh(logits)
            if cut is not None:
                ids = torch.arange(start, stop, device=logits.device)
                weights.masked_fill_(~stays(logits, ids, cut), 0)
            sums.append(weights.view(len(weights), -1, min(TILE, stop - start)).sum(-1))
        return torch.cat(sums, 1)


def stays(logits: Tensor, ids: Tensor, cut: Cut) -> Tensor:
    """Which tokens the cut leaves. ids: of the logits, [tokens] or [rows, tokens] int64."""
    return (logits > cut.lowest) | ((logits == cut.lowest) & (ids <= cut.last_id))


def pick(drawn: Drawn, cut: Cut | None) -> Tensor:
    """The first token of each row whose cumulative weight exceeds its uniform's part of all: [drawn]."""
    sums = drawn.tile_sums(cut)
    ends = sums.cumsum(-1)
    goal = target(ends[:, -1:], random_words(drawn.rows).unsqueeze(1))
    tile = (ends <= goal).sum(-1, keepdim=True)
    ids = ids_of(tile.squeeze(1), drawn.vocab_size)
    logits = drawn.logits_at(ids)
    weights = drawn.weigh(logits)
    if cut is not None:
        weights.masked_fill_(~stays(logits, ids, cut), 0)
    reached = (ends - sums).gather(1, tile) + weights.cumsum(-1)
    return ids.gather(1, (reached <= goal).sum(-1, keepdim=True)).squeeze(1)


def random_words(rows: SamplingRows) -> Tensor:
    """Each row's word of Philox: [rows] int64 on their device."""
    seed, position, sample_index = (
        column.cpu().numpy().view(np.uint64) for column in (rows.seed, rows.position, rows.sample_index)
    )
    words = first_words(seed, position, sample_index).view(np.int64)
    return torch.from_numpy(words).to(rows.seed.device)


def find_cut(drawn: Drawn, num_candidates: int = NUCLEUS_GUESS) -> Cut:
    """What top_k and top_p keep of what min_p leaves of each row.

    Looks at the num_candidates highest logits of each row, and at as many as top_k may keep; where a nucleus
    may be wider, at all.
    """
    vocab_size = drawn.vocab_size
    top_k, top_p = drawn.rows.top_k.long(), drawn.rows.top_p
    num_candidates = min(vocab_size, max(num_candidates, int(top_k.max())))
    logits = drawn.logits(0, vocab_size).float()
    ordered = logits.topk(num_candidates, dim=-1).values
    ends = drawn.weigh(ordered).cumsum(-1)
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size)
    last = (limit.clamp(max=num_candidates) - 1).unsqueeze(1)
    total = ends.gather(1, last).squeeze(1)
    if bool((top_k <= 0).any()):
        total = torch.where(top_k > 0, total, drawn.tile_sums().sum(-1))
    # the token that reaches top_p of the weight stays: count those before it and add one
    nucleus = (ends < share(total, top_p).unsqueeze(1)).sum(-1) + 1
    num_kept = torch.minimum(limit, torch.where(top_p < 1, nucleus, vocab_size))
    is_known = num_kept <= num_candidates
    num_kept.clamp_(max=num_candidates)
    lowest = ordered.gather(1, (num_kept - 1).unsqueeze(1))
    room = num_kept - (ordered > lowest).sum(-1)
    cut = Cut(lowest, last_id_of_equals(logits == lowest, room).unsqueeze(1))
    wider = (~is_known).nonzero().squeeze(1)
    if len(wider):
        again = find_cut(drawn.only(wider), vocab_size)
        cut.lowest[wider], cut.last_id[wider] = again.lowest, again.last_id
    return cut


def last_id_of_equals(equal: Tensor, room: Tensor) -> Tensor:
    """The token id of the room-th of the equal tokens, the vocabulary's last where all have room: [rows]."""
    vocab_size = equal.shape[1]
    last_id = torch.full_like(room, vocab_size - 1)
    short = (equal.sum(-1) > room).nonzero().squeeze(1)
    last_id[short] = (equal[short].cumsum(-1) < room[short].unsqueeze(1)).sum(-1)
    return last_id
