"""TokenCounts: which tokens a sequence has, and how often its completion has each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

FIRST_ROOM = 64


class TokenCounts:
    """One entry for each token that occurred, in an array that grows: none costs more than another.

    Behind them is always the entry of token -1, never counted.
    """

    def __init__(self, prompt_token_ids: NDArray[np.int32]) -> None:
        """prompt_token_ids: [tokens] those of the prompt that have an entry, each once."""
        self._size = len(prompt_token_ids)
        self._entries = np.zeros((self._size + FIRST_ROOM, 2), np.int32)
        self._entries[: self._size, 0] = prompt_token_ids
        self._entries[self._size, 0] = -1
        self._index = {token_id: i for i, token_id in enumerate(prompt_token_ids.tolist())}

    def add(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the completion."""
        for token_id in token_ids:
            place = self._index.setdefault(token_id, self._size)
            if place == self._size:
                self._size += 1
                if self._size == len(self._entries):
                    self._entries = np.concatenate((self._entries, np.zeros_like(self._entries)))
                self._entries[place : place + 2, 0] = token_id, -1
            self._entries[place, 1] += 1

    def entries(self, *, with_pending: bool) -> NDArray[np.int32]:
        """[tokens, 2]: a token, and how often the completion has it; to be copied before the next `add`.

        with_pending: with the entry of token -1.
        """
        return self._entries[: self._size + with_pending]
