"""Makes edits of logits of every kind, for a check of the kernel that applies them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.sampling.logit_edits import EditParts, LogitEdits, token_mask


class PendingEdits(NamedTuple):
    """Edits, and the tokens that are pending in them. sampled: [tokens] int64."""

    edits: LogitEdits
    sampled: NDArray[np.int64]


def every_edit(rows: NDArray[np.int64], vocab_size: int) -> PendingEdits:
    """Return edits of all kinds for each of these rows, at tokens that its mask allows: a mask would hide the others.

    In one row of two the pending token has been counted before. In the others the entry of token -1 counts it.
    """
    (banned, behind, not_behind, biased, counted, absent, last, other) = np.linspace(
        0, vocab_size - 1, 8
    ).astype(np.int64)
    allowed = np.random.default_rng(0).random(vocab_size) < 0.5
    allowed[[banned, behind, not_behind, biased, counted, absent, last, other]] = True
    mask = token_mask(np.flatnonzero(allowed).tolist(), vocab_size)

    parts = EditParts()
    sampled = np.full(len(rows), other)
    for place in range(len(rows)):
        index = len(rows) - 1 - place
        sampled[index] = counted if place % 2 else last
        parts.pending.append((place, index))
        parts.allow(place, mask)
        parts.banned.append((place, np.array([banned])))
        pairs = [[sampled[index], behind], [other, not_behind]]
        parts.banned_behind.append((place, np.array(pairs)))
        parts.biased.append((place, np.array([biased, counted])))
        parts.biases.append(np.array([1.5, -0.5], np.float32))
        entries = [[counted, 2], [absent, 0], [-1, 0]]
        parts.penalize(place, (0.5, 0.25, 1.5), np.array(entries, np.int32))
    return PendingEdits(parts.joined(rows), sampled)
