"""Which share of its rows a shard has to compute, where those that are equal have one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, log


@dataclass(frozen=True)
class Computed:
    """A finished shard. place: rows of the run before its middle. rows: how many of its rows had an answer of
    their own; share: of all of them."""

    place: float
    rows: float
    share: float


@dataclass(frozen=True)
class ComputedShare:
    """A share that grows or falls by the same factor with each row: exp(level + slope * place).

    So it does where rows are drawn from a number of texts: each row makes the next one's text less likely to
    be new.
    """

    level: float = 0.0
    slope: float = 0.0

    def at(self, place: float) -> float:
        return min(1.0, exp(min(0.0, max(-20.0, self.level + self.slope * place))))

    @classmethod
    def of(cls, shards: Sequence[Computed]) -> ComputedShare:
        """Return what finished shards say, by weighted least squares of the share's logarithm.

        A share that is counted in n rows is off by a part of 1/sqrt(n): hence the weights. So little of the
        slope is believed as it is small beside its standard error.
        """
        known = [each for each in shards if each.rows > 0 and each.share > 0]
        weights = fsum(each.rows for each in known)
        if not weights or all(each.share >= 1 for each in known):
            return cls()
        middle = fsum(each.rows * each.place for each in known) / weights
        level = fsum(each.rows * log(each.share) for each in known) / weights
        spread = fsum(each.rows * (each.place - middle) ** 2 for each in known)
        together = fsum(each.rows * (each.place - middle) * log(each.share) for each in known)
        # together / spread by together^2 / (together^2 + spread): its standard error is 1 / sqrt(spread).
        slope = together**3 / (spread * (together**2 + spread)) if spread > 0 else 0.0
        return cls(level - slope * middle, slope)
