"""BadWords: the texts a completion may not hold, as tokens, and which of these are banned next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

TokenIds = tuple[int, ...]


class BadWords:
    """One request's bad words. A word's last token is banned behind its other tokens.

    What is looked at for each token does not grow with the completion, nor with words that have not begun.
    """

    def __init__(self, words: Iterable[TokenIds]) -> None:
        """words: each as tokens, one at least."""
        words = list(dict.fromkeys(words))
        self._single = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._double = np.array([word for word in words if len(word) == 2], np.int64).reshape(-1, 2)
        self._by_known: dict[int, list[TokenIds]] = {}  # by the token before the last
        self._by_second: dict[int, list[TokenIds]] = {}  # those of three tokens and more, by the one before
        for word in words:
            if len(word) > 1:
                self._by_known.setdefault(word[-2], []).append(word)
            if len(word) > 2:
                self._by_second.setdefault(word[-3], []).append(word)

    def banned(self, token_ids: Sequence[int], start: int, *, is_pending: bool) -> NDArray[np.int64]:
        """[bans] token ids that may not come next, whatever a pending token is.

        token_ids: as far as they are known; those of the completion begin at `start`.
        """
        if is_pending:
            return self._single
        more = [word[-1] for word in self._matching(self._by_known, 1, token_ids, start)]
        return np.concatenate((self._single, np.array(more, np.int64))) if more else self._single

    def banned_behind(self, token_ids: Sequence[int], start: int) -> NDArray[np.int64]:
        """[bans, 2]: a pending token behind the known ones, and the token that may not come behind it."""
        more = [word[-2:] for word in self._matching(self._by_second, 2, token_ids, start)]
        return np.concatenate((self._double, np.array(more, np.int64))) if more else self._double

    def _matching(
        self, words: dict[int, list[TokenIds]], num_open: int, token_ids: Sequence[int], start: int
    ) -> list[TokenIds]:
        """Return the words that the last known tokens begin, all but their last num_open tokens."""
        num_generated = len(token_ids) - start
        if not num_generated:
            return []
        found = []
        for word in words.get(token_ids[-1], ()):
            known = word[:-num_open]
            if len(known) <= num_generated and tuple(token_ids[-len(known) :]) == known:
                found.append(word)
        return found
