"""Edits of logits before tokens are chosen: of a request, of a sequence, and of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.sampling.sampling_params import SamplingParams

WORD = 32  # tokens of a mask in one number


@dataclass(frozen=True)
class LogitEdits:
    """Edits of some rows of logits, as numpy arrays, applied in the order of the fields, as in vLLM.

    rows: [edited] int64, the edited rows, ascending; a place, below, is an index into these.
    pending: [pending, 2] int64, a place whose last token was still being sampled when this was built, and the index of
    that token among the samples of the step launched before. After `placed` it is the token's index in a tensor.
    token_masks: [masks, ceil(vocabulary / 32)] int32, a bit for each token, the lowest first: 1 is allowed.
    masked: [masked, 2] int64, a place and its mask, each place once. The entries below ascend by place.
    banned: [bans, 2] int64, a place and a token it may not choose.
    banned_behind: [bans, 3] int64, a place and two tokens: if the first is the pending token, the second is banned.
    biased: [biased, 2] int64, a place and a token, each pair once.  biases: [biased] float32.
    penalized: [penalized] int64 places.  penalties: [penalized, 3] float32, presence, frequency, repetition.
    num_counted: [penalized] int64, how many entries of `counted` each penalized place has, one place after another.
    counted: [counted, 2] int32, a token of its prompt or completion, and its count in the completion; a pending
    token has an entry of token -1.
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
        """Return the edits for other rows of logits, and for a tensor that holds the pending tokens.

        rows: [edited] int64, the new rows.  tokens: [pending] int64, the index of each pending token in that tensor.
        """
        return replace(self, rows=rows, pending=np.stack((self.pending[:, 0], tokens), axis=1))

    def without_masks(self) -> LogitEdits | None:
        """Return the edits without those of `masked`; None if nothing is left."""
        unmasked = (self.banned, self.banned_behind, self.biased, self.penalized)
        return replace(self, masked=self.masked[:0]) if any(map(len, unmasked)) else None


def token_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Return the mask that allows only these tokens: [ceil(vocab_size / 32)] int32."""
    bits = np.zeros(-(-vocab_size // WORD) * WORD, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


@dataclass
class EditParts:
    """LogitEdits while they are collected, place after place. Most lists hold pairs of a place and its entries."""

    pending: list[tuple[int, int]] = field(default_factory=list)
    #: Each mask's index, and the mask, by the mask object's id(): many rows share one mask object.
    masks: dict[int, tuple[int, NDArray[np.int32]]] = field(default_factory=dict)
    masked: list[tuple[int, int]] = field(default_factory=list)
    #: Places whose mask is computed later. Those masks come behind all of `masks`.
    later: list[int] = field(default_factory=list)
    banned: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    banned_behind: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    biased: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    biases: list[NDArray[np.float32]] = field(default_factory=list)
    penalized: list[int] = field(default_factory=list)
    penalties: list[tuple[float, float, float]] = field(default_factory=list)
    counted: list[NDArray[np.int32]] = field(default_factory=list)

    def allow(self, place: int, mask: NDArray[np.int32]) -> None:
        """Allow a place only the tokens of a mask."""
        index, _ = self.masks.setdefault(id(mask), (len(self.masks), mask))
        self.masked.append((place, index))

    def penalize(
        self, place: int, penalties: tuple[float, float, float], counted: NDArray[np.int32]
    ) -> None:
        """Penalize the tokens of a place. counted: [tokens, 2], each token and its count in the completion."""
        self.counted.append(counted)
        self.penalized.append(place)
        self.penalties.append(penalties)

    def joined(self, rows: NDArray[np.int64], num_words: int = 0) -> LogitEdits:
        """Join all parts. rows: the row of each place. num_words: the width of the masks computed later, now zeros."""
        masks = [mask for _, mask in self.masks.values()]
        masked_now = np.array(self.masked, np.int64).reshape(-1, 2)
        later_indexes = np.arange(len(masks), len(masks) + len(self.later))
        masked_later = np.stack((np.array(self.later, np.int64), later_indexes), axis=1)
        return LogitEdits(
            rows=rows,
            pending=np.array(self.pending, np.int64).reshape(-1, 2),
            token_masks=_stacked(masks, len(self.later), num_words),
            masked=np.concatenate((masked_now, masked_later)),
            banned=_joined(sorted(self.banned, key=itemgetter(0)), 1, np.int64),
            banned_behind=_joined(self.banned_behind, 2, np.int64),
            biased=_joined(self.biased, 1, np.int64),
            biases=np.concatenate(self.biases) if self.biases else np.zeros(0, np.float32),
            penalized=np.array(self.penalized, np.int64),
            penalties=np.array(self.penalties, np.float32).reshape(-1, 3),
            num_counted=np.array([len(counts) for counts in self.counted], np.int64),
            counted=np.concatenate(self.counted) if self.counted else np.zeros((0, 2), np.int32),
        )


def _stacked(masks: list[NDArray[np.int32]], num_later: int, num_words: int) -> NDArray[np.int32]:
    """Stack the masks, and num_later masks of zeros behind them: [masks, words of the longest].

    num_words: of each later mask.
    """
    width = max([num_words if num_later else 0, *map(len, masks)])
    stacked = np.zeros((len(masks) + num_later, width), np.int32)
    for row, mask in zip(stacked, masks, strict=False):
        row[: len(mask)] = mask
    return stacked


def _joined(parts: list[tuple[int, NDArray[Any]]], width: int, dtype: Any) -> NDArray[Any]:
    """Join the entries of all places into one array, [entries, 1 + width]: each row is a place and its entry."""
    if not parts:
        return np.zeros((0, 1 + width), dtype)
    lengths = [len(part) for _, part in parts]
    joined = np.empty((sum(lengths), 1 + width), dtype)
    joined[:, 0] = np.repeat([place for place, _ in parts], lengths)
    joined[:, 1:] = np.concatenate([part for _, part in parts]).reshape(-1, width)
    return joined


TokenIds = tuple[int, ...]


class BadWords:
    """One request's bad words. A word's last token is banned wherever its other tokens stand before it."""

    def __init__(self, words: Iterable[TokenIds]) -> None:
        """words: each as one or more token ids."""
        words = list(dict.fromkeys(words))
        self._single = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._double = np.array([word for word in words if len(word) == 2], np.int64).reshape(-1, 2)
        # Words of two tokens or more, by their last token but one.
        self._by_known: dict[int, list[TokenIds]] = {}
        # Words of three tokens or more, by their last token but two.
        self._by_second: dict[int, list[TokenIds]] = {}
        for word in words:
            if len(word) > 1:
                self._by_known.setdefault(word[-2], []).append(word)
            if len(word) > 2:
                self._by_second.setdefault(word[-3], []).append(word)

    def banned(
        self, token_ids: Sequence[int], start: int, *, is_pending: bool
    ) -> NDArray[np.int64]:
        """Return [bans] token ids that may not come next: if the last token is pending, only the words of one token.

        start: where the completion begins.
        """
        if is_pending:
            return self._single
        more = [word[-1] for word in self._matching(self._by_known, 1, token_ids, start)]
        return np.concatenate((self._single, np.array(more, np.int64))) if more else self._single

    def banned_behind(self, token_ids: Sequence[int], start: int) -> NDArray[np.int64]:
        """Return [bans, 2], pairs of tokens: if the first is the pending token, the second may not come next."""
        more = [word[-2:] for word in self._matching(self._by_second, 2, token_ids, start)]
        return np.concatenate((self._double, np.array(more, np.int64))) if more else self._double

    def _matching(
        self, words: dict[int, list[TokenIds]], num_open: int, token_ids: Sequence[int], start: int
    ) -> list[TokenIds]:
        """Return the words that the known tokens end with, apart from each word's last num_open tokens.

        start: where the completion begins. A word matches only within the completion.
        """
        num_generated = len(token_ids) - start
        if not num_generated:
            return []
        matching = []
        for word in words.get(token_ids[-1], ()):
            known = word[:-num_open]
            if len(known) <= num_generated and tuple(token_ids[-len(known) :]) == known:
                matching.append(word)
        return matching


FIRST_ROOM = 64


class TokenCounts:
    """Counts each token of the completion, in an array that grows.

    Behind the counted tokens stands an entry of token -1, for a pending token.
    """

    def __init__(self, prompt_token_ids: NDArray[np.int32], start: int) -> None:
        """prompt_token_ids: [tokens], each once; each has a count of 0 at first. start: where the completion begins."""
        self._num_counted = start
        self._size = len(prompt_token_ids)
        self._entries = np.zeros((self._size + FIRST_ROOM, 2), np.int32)
        self._entries[: self._size, 0] = prompt_token_ids
        self._entries[self._size, 0] = -1
        self._index = {token_id: i for i, token_id in enumerate(prompt_token_ids.tolist())}

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the completion's tokens that are not counted yet. token_ids: all known tokens of the sequence."""
        for token_id in token_ids[self._num_counted :]:
            index = self._index.setdefault(token_id, self._size)
            if index == self._size:
                self._size += 1
                if self._size == len(self._entries):
                    self._entries = np.concatenate((self._entries, np.zeros_like(self._entries)))
                self._entries[index, 0] = token_id
                self._entries[index + 1, 0] = -1  # the pending token's entry moves back by one
            self._entries[index, 1] += 1
        self._num_counted = len(token_ids)

    def entries(self, *, with_pending: bool) -> NDArray[np.int32]:
        """Return [tokens, 2], each token and its count. The array changes with the next `add`."""
        num_entries = self._size + 1 if with_pending else self._size
        return self._entries[:num_entries]


@dataclass(frozen=True)
class RequestEdits:
    """The edits shared by all samples and tokens of a request.

    mask: as of LogitEdits.token_masks, None if all tokens are allowed.  biased: [biased] int64 token ids.
    penalties: presence, frequency, repetition.
    prompt_token_ids: each token of the prompt once, if repetition is penalized; else empty.
    """

    mask: NDArray[np.int32] | None
    biased: NDArray[np.int64]
    biases: NDArray[np.float32]
    bad_words: BadWords | None
    penalties: tuple[float, float, float] | None
    prompt_token_ids: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        bad_words: Iterable[TokenIds],
    ) -> RequestEdits | None:
        """Return a request's edits, None if it has none.

        With structured outputs, allowed_token_ids are left out here: the grammar's masks take them into account.
        """
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        has_penalties = penalties != (0, 0, 1)
        words = [word for word in bad_words if max(word) < vocab_size]  # others are never chosen
        allowed = (
            allowed_mask(params.allowed_token_ids, vocab_size)
            if params.structured_outputs is None
            else None
        )
        bias = params.logit_bias
        if not (has_penalties or words or allowed is not None or bias):
            return None
        counted = prompt_token_ids if params.repetition_penalty != 1 else ()
        return cls(
            mask=allowed,
            biased=np.array(list(bias or ()), np.int64),
            biases=np.array(list((bias or {}).values()), np.float32),
            bad_words=BadWords(words) if words else None,
            penalties=penalties if has_penalties else None,
            prompt_token_ids=np.unique(np.array(counted, np.int32)),
        )


class SequenceEdits:
    """Keeps the edits of a sequence's logits as its tokens come to be known."""

    __slots__ = ("_counts", "_request")

    def __init__(self, request: RequestEdits) -> None:
        self._request = request
        self._counts: TokenCounts | None = None

    def write(
        self,
        parts: EditParts,
        place: int,
        token_ids: Sequence[int],
        start: int,
        pending_sample: int | None,
    ) -> None:
        """Write the edits for the next token into `parts`.

        token_ids: the known ones. start: where the completion begins.
        pending_sample: of LogitEdits.pending, None if all tokens are known.
        """
        request = self._request
        is_pending = pending_sample is not None
        if pending_sample is not None:
            parts.pending.append((place, pending_sample))
        if request.mask is not None:
            parts.allow(place, request.mask)
        if request.bad_words is not None:
            banned = request.bad_words.banned(token_ids, start, is_pending=is_pending)
            parts.banned.append((place, banned))
            if is_pending:
                parts.banned_behind.append(
                    (place, request.bad_words.banned_behind(token_ids, start))
                )
        if len(request.biased):
            parts.biased.append((place, request.biased))
            parts.biases.append(request.biases)
        if request.penalties is not None:
            if self._counts is None:
                self._counts = TokenCounts(request.prompt_token_ids, start)
            self._counts.add(token_ids)
            parts.penalize(place, request.penalties, self._counts.entries(with_pending=is_pending))


@lru_cache(maxsize=16)  # rows of a run name the same ids again and again, and then share a mask
def allowed_mask(allowed: Sequence[int] | None, vocab_size: int) -> NDArray[np.int32] | None:
    """Return the mask of a request's allowed tokens, None for all."""
    return None if allowed is None else token_mask(allowed, vocab_size)
