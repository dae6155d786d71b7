"""LogitEdits: what to change of a step's logits before tokens are chosen, and how it is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD = 32  # tokens of a mask in one number


@dataclass(frozen=True)
class LogitEdits:
    """Edits of some rows of logits, as numpy arrays. They are made in the order of the fields, as vLLM does.

    rows: [edited] int64, the rows that are edited, ascending; elsewhere a place is an index of this.
    pending: [pending, 2] int64, a place whose row continues a token that was not known when this was built,
    and which sample of the step launched before is that token; where it lies, once that is known (`placed`).
    token_masks: [masks, ceil(vocabulary / 32)] int32, a bit for each token, the lowest first: 1 is allowed.
    masked: [masked, 2] int64, a place and its mask; a place is there once.
    banned: [bans, 2] int64, a place and a token it may not choose.
    banned_behind: [bans, 3] int64, a place, a token, and another that it may not choose if its pending token
    is the first.
    biased: [biased, 2] int64, a place and a token, each pair once.  biases: [biased] float32.
    penalized: [penalized] int64 places.  penalties: [penalized, 3] float32, presence, frequency, repetition.
    num_counted: [penalized] int64, how many entries of `counted` each has, which lie in this order.
    counted: [counted, 2] int32, a token of its prompt or completion, and how often the completion has it; a
    place that is pending has one more entry, of token -1, for that token.
    """

    rows: NDArray[np.int64]
    pending: NDArray[np.int64]
    token_masks: NDArray[np.int32]
    masked: NDArray[np.int64]
    banned: NDArray[np.int64]
    banned_behind: NDArray[np.int64]
    biased: NDArray[np.int64]
    biases: NDArray[np.float32]
    penalized: NDArray[np.int64]
    penalties: NDArray[np.float32]
    num_counted: NDArray[np.int64]
    counted: NDArray[np.int32]

    def placed(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> LogitEdits:
        """Return the edits with rows and pending tokens as places in the logits and in a tensor.

        rows: [edited] int64.  tokens: [pending] int64.
        """
        return replace(self, rows=rows, pending=np.stack((self.pending[:, 0], tokens), axis=1))

    def without_masks(self) -> LogitEdits | None:
        """What is left when those are made; None if nothing is."""
        others = (self.banned, self.banned_behind, self.biased, self.penalized)
        return replace(self, masked=self.masked[:0]) if any(map(len, others)) else None


def token_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """[ceil(vocab_size / 32)] int32: the mask that allows these tokens alone."""
    bits = np.zeros(-(-vocab_size // WORD) * WORD, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


@dataclass
class EditParts:
    """LogitEdits while they are collected, place after place: for each part a place and its arrays."""

    pending: list[tuple[int, int]] = field(default_factory=list)
    #: By id, since many rows share one: its index, and itself.
    masks: dict[int, tuple[int, NDArray[np.int32]]] = field(default_factory=dict)
    masked: list[tuple[int, int]] = field(default_factory=list)
    #: Places whose mask is computed later, behind the others.
    later: list[int] = field(default_factory=list)
    banned: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    banned_behind: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    biased: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    biases: list[NDArray[np.float32]] = field(default_factory=list)
    penalized: list[int] = field(default_factory=list)
    penalties: list[tuple[float, float, float]] = field(default_factory=list)
    counted: list[NDArray[np.int32]] = field(default_factory=list)

    def allow(self, place: int, mask: NDArray[np.int32]) -> None:
        """Allow a place the tokens of a mask alone."""
        index, _ = self.masks.setdefault(id(mask), (len(self.masks), mask))
        self.masked.append((place, index))

    def penalize(self, place: int, penalties: tuple[float, float, float], counted: NDArray[np.int32]) -> None:
        """Penalize the tokens of a place. counted: [tokens, 2], a token and how often it is there."""
        self.counted.append(counted)
        self.penalized.append(place)
        self.penalties.append(penalties)

    def joined(self, rows: NDArray[np.int64], num_words: int = 0) -> LogitEdits:
        """All of them. rows: of each place. num_words: of the masks that come later, which are zeros now."""
        masks = [mask for _, mask in self.masks.values()]
        now = np.array(self.masked, np.int64).reshape(-1, 2)
        later = np.arange(len(masks), len(masks) + len(self.later))
        later = np.stack((np.array(self.later, np.int64), later), axis=1)
        return LogitEdits(
            rows=rows,
            pending=np.array(self.pending, np.int64).reshape(-1, 2),
            token_masks=_stacked(masks, len(self.later), num_words),
            masked=np.concatenate((now, later)),
            banned=_joined(self.banned, 1, np.int64),
            banned_behind=_joined(self.banned_behind, 2, np.int64),
            biased=_joined(self.biased, 1, np.int64),
            biases=np.concatenate(self.biases) if self.biases else np.zeros(0, np.float32),
            penalized=np.array(self.penalized, np.int64),
            penalties=np.array(self.penalties, np.float32).reshape(-1, 3),
            num_counted=np.array([len(each) for each in self.counted], np.int64),
            counted=np.concatenate(self.counted) if self.counted else np.zeros((0, 2), np.int32),
        )


def _stacked(masks: list[NDArray[np.int32]], num_later: int, num_words: int) -> NDArray[np.int32]:
    """[masks, words of the longest]: the masks, then so many of zeros."""
    width = max([num_words if num_later else 0, *map(len, masks)])
    stacked = np.zeros((len(masks) + num_later, width), np.int32)
    for row, mask in zip(stacked, masks, strict=False):
        row[: len(mask)] = mask
    return stacked


def _joined(parts: list[tuple[int, NDArray[Any]]], width: int, dtype: Any) -> NDArray[Any]:
    """[entries, 1 + width]: beside each entry of a part, [entries, width] or [entries], the part's place."""
    if not parts:
        return np.zeros((0, 1 + width), dtype)
    lengths = [len(part) for _, part in parts]
    joined = np.empty((sum(lengths), 1 + width), dtype)
    joined[:, 0] = np.repeat([place for place, _ in parts], lengths)
    joined[:, 1:] = np.concatenate([part for _, part in parts]).reshape(-1, width)
    return joined
