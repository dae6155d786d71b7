"""What sampling values change of logits: RequestEdits for all of a request, SequenceEdits as it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.sampling.bad_words import BadWords, TokenIds
from engine.sampling.logit_edits import EditParts, token_mask
from engine.sampling.parameters.sampling import SamplingParams
from engine.sampling.token_counts import TokenCounts

NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(frozen=True)
class RequestEdits:
    """What is the same for all samples of a request, and for all their tokens.

    mask: as of LogitEdits.token_masks, None if all tokens are allowed.  biased: [biased] int64 token ids.
    biases: [biased] float32.  bad_words: None if there are none.  penalties: presence, frequency, repetition;
    None if they change nothing.  prompt_token_ids: [tokens] int32, those of the prompt, each once, where a
    penalty asks for them.
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
        """None if the logits stay as they are. bad_words: as BadWords has them.

        A grammar's own masks hold the tokens that are allowed too.
        """
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        has_penalties = penalties != (0, 0, 1)
        words = [word for word in bad_words if max(word) < vocab_size]  # others are never chosen
        allowed = allowed_mask(params, vocab_size) if params.structured_outputs is None else None
        bias = params.logit_bias
        if not (has_penalties or words or allowed is not None or bias):
            return None
        return cls(
            mask=allowed,
            biased=np.array(list(bias or ()), np.int64),
            biases=np.array(list((bias or {}).values()), np.float32),
            bad_words=BadWords(words) if words else None,
            penalties=penalties if has_penalties else None,
            prompt_token_ids=(
                NO_TOKENS
                if params.repetition_penalty == 1
                else np.unique(np.array(prompt_token_ids, np.int32))
            ),
        )


class SequenceEdits:
    """What a sequence's logits need next, kept as its tokens come to be known."""

    __slots__ = ("_counts", "_num_counted", "_request")

    def __init__(self, request: RequestEdits) -> None:
        self._request = request
        self._counts: TokenCounts | None = None
        self._num_counted = 0

    def write(
        self, parts: EditParts, place: int, token_ids: Sequence[int], start: int, pending_sample: int | None
    ) -> None:
        """Write the edits for the token that comes next into `parts`.

        token_ids: as far as they are known; never fewer than before. start: where the completion begins.
        pending_sample: of LogitEdits.pending, None where all before are known.
        """
        request, is_pending = self._request, pending_sample is not None
        if pending_sample is not None:
            parts.pending.append((place, pending_sample))
        if request.mask is not None:
            parts.allow(place, request.mask)
        if request.bad_words is not None:
            banned = request.bad_words.banned(token_ids, start, is_pending=is_pending)
            parts.banned.append((place, banned))
            if is_pending:
                parts.banned_behind.append((place, request.bad_words.banned_behind(token_ids, start)))
        if len(request.biased):
            parts.biased.append((place, request.biased))
            parts.biases.append(request.biases)
        if request.penalties is not None:
            counts = self._count(request, token_ids, start)
            parts.penalize(place, request.penalties, counts.entries(with_pending=is_pending))

    def _count(self, request: RequestEdits, token_ids: Sequence[int], start: int) -> TokenCounts:
        """Count all tokens that are known."""
        if self._counts is None:
            self._counts, self._num_counted = TokenCounts(request.prompt_token_ids), start
        self._counts.add(token_ids[self._num_counted :])
        self._num_counted = len(token_ids)
        return self._counts


def allowed_mask(params: SamplingParams, vocab_size: int) -> NDArray[np.int32] | None:
    """The mask of the tokens that a request allows, None for all."""
    allowed = params.allowed_token_ids
    return None if allowed is None else _mask_of(tuple(allowed), vocab_size)


@lru_cache(maxsize=16)  # rows of a run name the same ids again and again, and then share a mask
def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> NDArray[np.int32]:
    return token_mask(token_ids, vocab_size)
