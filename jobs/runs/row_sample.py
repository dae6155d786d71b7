"""Which rows of a run are looked at again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from random import Random

from ..common.shown import shown
from ..errors import InvalidValue

#: All their prompts and answers are held in the worker's memory.
MAX_ROWS = 100_000

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%", re.ASCII)
_COUNT = re.compile(r"\d{1,12}", re.ASCII)


@dataclass(frozen=True)
class RowSample:
    """Some rows of a run: a share of them from 0 to 1, of which at least one, or a number."""

    share: Fraction | None
    count: int = 1

    @classmethod
    def parse(cls, value: object) -> RowSample:
        """Read "1%", 20 or "20". Raises InvalidValue."""
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str):
            if (match := _SHARE.fullmatch(text)) and 0 < (share := Fraction(match[1]) / 100) <= 1:
                return cls(share)
            if _COUNT.fullmatch(text) and int(text) > 0:
                return cls(None, int(text))
        raise InvalidValue("sample is {}, expected a share as 1%, or a number of rows from 1", shown(value))

    def rows(self, run: str, total: int, seed: int, most: int = MAX_ROWS) -> list[int]:
        """Return the numbers of the rows, sorted: the same for the same run and seed.

        total: rows of the run. Raises InvalidValue for more than `most`.
        """
        count = min(total, self.count if self.share is None else max(1, ceil(self.share * total)))
        if count > most:
            raise InvalidValue(f"sample has {{}} rows, more than the limit of {most}: take fewer", count)
        return sorted(Random(f"{run}:{seed}").sample(range(total), count))
