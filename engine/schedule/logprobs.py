"""Log probabilities of tokens: arrays as steps return them, and dicts as completions hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.schedule.outputs import Logprob
from engine.text.tokenizer import TokenText

NOT_WANTED = -1  # in place of a number of likely tokens: no log probabilities are wanted


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The log probabilities of rows: of one token each, and of the most likely ones.

    logprobs: [rows] float32.  ranks: [rows] int64.  starts: [rows + 1] int64: row i has the top_ids, int32,
    and top_logprobs, float32, from starts[i] to starts[i + 1], the likeliest first.
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    starts: NDArray[np.int64]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    def rows(self, first: int, end: int) -> RowLogprobs:
        """Return a copy of the rows from `first` up to `end`."""
        top = slice(self.starts[first], self.starts[end])
        return RowLogprobs(
            self.logprobs[first:end].copy(),
            self.ranks[first:end].copy(),
            self.starts[first : end + 1] - self.starts[first],
            self.top_ids[top].copy(),
            self.top_logprobs[top].copy(),
        )


def as_dicts(
    known: Sequence[RowLogprobs],
    token_ids: Sequence[int],
    num_top: int,
    text_of: Callable[[int], TokenText],
) -> list[dict[int, Logprob]]:
    """Return log probabilities by token id for each token: its own first, then the likeliest ones.

    known: in the order of the tokens; any beyond the last token are left out.  text_of: a token's text.
    """
    dicts: list[dict[int, Logprob]] = []
    for part in known:
        starts = part.starts[:-1].tolist()
        ends = part.starts[1:].tolist()
        rows = zip(part.logprobs.tolist(), part.ranks.tolist(), starts, ends, strict=True)
        part_token_ids = token_ids[len(dicts) :]
        for token_id, (logprob, rank, start, end) in zip(part_token_ids, rows, strict=False):
            by_token = {token_id: _logprob(logprob, rank, text_of(token_id))}
            top = slice(start, min(end, start + num_top))
            # Negative, so that they sort by falling probability, and equal ones by token id.
            negatives = (-part.top_logprobs[top]).tolist()
            likeliest = sorted(zip(negatives, part.top_ids[top].tolist(), strict=True))
            for top_rank, (negative, other_id) in enumerate(likeliest, start=1):
                if other_id != token_id:
                    by_token[other_id] = _logprob(-negative, top_rank, text_of(other_id))
            dicts.append(by_token)
    return dicts


def _logprob(logprob: float, rank: int, token: TokenText) -> Logprob:
    return Logprob(logprob, rank, token.text, token.partial)
