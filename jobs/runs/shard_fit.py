"""What a shard costs by its rows and their size, as far as others tell. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True)
class Extent:
    """What is known of a shard before it is computed. size: bytes of what its rows ask, or whatever is
    proportional to it; its rows where nothing is known."""

    rows: float
    size: float


@dataclass(frozen=True)
class Scale:
    """A run's rows and size, of which each shard is a share."""

    rows: float
    size: float

    def of(self, extent: Extent, share: float = 1.0) -> tuple[float, float]:
        return share * extent.rows / self.rows, share * extent.size / self.size


@dataclass(frozen=True)
class Sample:
    """What was found for shares of the run's rows and size. weight: more for what was lately."""

    rows: float
    size: float
    value: float
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """Of all of a run's rows, and of all of its size."""

    rows: float
    size: float

    def at(self, rows: float, size: float) -> float:
        return rows * self.rows + size * self.size


def fit(samples: Sequence[Sample]) -> Fit | None:
    """Return what fits best by least squares, drawn to equal parts while little is known.

    None where nothing is known.
    """
    shares = fsum(each.weight * (each.rows + each.size) for each in samples)
    value = fsum(each.weight * each.value for each in samples)
    if shares <= 0 or value <= 0:
        return None
    middle = value / shares
    # Weighted by the inverse of what is expected: an end that is off by a second is so for any shard.
    each = [(one.weight / (one.rows + one.size), one) for one in samples if one.rows + one.size > 0]
    pull = fsum(weight * (one.rows + one.size) ** 2 for weight, one in each) / (4 * len(each))
    a = fsum(weight * one.rows * one.rows for weight, one in each) + pull
    b = fsum(weight * one.rows * one.size for weight, one in each)
    c = fsum(weight * one.size * one.size for weight, one in each) + pull
    p = fsum(weight * one.rows * one.value for weight, one in each) + pull * middle
    q = fsum(weight * one.size * one.value for weight, one in each) + pull * middle
    determinant = a * c - b * b
    by_rows, by_size = (p * c - q * b) / determinant, (q * a - p * b) / determinant
    if by_rows < 0:
        return Fit(0.0, q / c)
    if by_size < 0:
        return Fit(p / a, 0.0)
    return Fit(by_rows, by_size)
