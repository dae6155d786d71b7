"""An index of keys: looks up, for the rows of a new run, which old rows have answers."""

import numpy as np
import numpy.typing as npt

from jobs.parquet.asks.row_keys import Keys

#: Of so many equal keys each is found in its turn; of more, the first of them.
MAX_EQUAL = 1000

Places = npt.NDArray[np.int64]


class KnownKeys:
    """Finds keys among at most `size` that were added. At most 32 bytes for each of these, while `sort` runs."""

    def __init__(self, size: int) -> None:
        self._first, self._second = np.empty(size, np.uint64), np.empty(size, np.uint64)
        self._order: Places = np.empty(0, np.int64)
        self._taken: dict[int, int] = {}
        self.size = 0

    def add(self, keys: Keys) -> None:
        """Take more keys; those of no row, zeros, are never found."""
        end = self.size + len(keys)
        self._first[self.size : end], self._second[self.size : end] = keys[:, 0], keys[:, 1]
        self.size = end

    def sort(self) -> None:
        self._first, self._second = self._first[: self.size], self._second[: self.size]
        self._order = np.argsort(self._first, kind="stable")
        self._first = self._first[self._order]

    def forget(self, places: Places) -> None:
        self._second[places] = 0

    def find(self, keys: Keys) -> Places:
        """Return the place of each key among those added, -1 where it is not.

        Equal ones are given out in the order they were added: rows that ask the same keep answers of their own.
        """
        first = np.ascontiguousarray(keys[:, 0])
        lows, highs = (np.searchsorted(self._first, first, side) for side in ("left", "right"))
        found = np.full(len(keys), -1, np.int64)
        single = (highs - lows == 1) & keys.any(axis=1)
        places = self._order[lows[single]]
        found[single] = np.where(self._second[places] == keys[single, 1], places, -1)
        for row in np.flatnonzero((highs - lows > 1) & keys.any(axis=1)):
            equal = self._order[lows[row] : min(highs[row], lows[row] + MAX_EQUAL)]
            equal = equal[self._second[equal] == keys[row, 1]]
            if len(equal):
                begin = int(equal[0])
                number = self._taken.get(begin, 0)
                self._taken[begin] = number + 1
                found[row] = equal[number % len(equal)]
        return found
