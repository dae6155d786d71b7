"""What a shard costs by its rows and their size, as far as others tell. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import fsum
from operator import mul


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
    """Of all of a run's rows, of all of its size, and what more a size takes in few rows: a token costs more
    the more there are before it."""

    rows: float
    size: float
    square: float = 0.0

    def at(self, rows: float, size: float) -> float:
        return fsum(map(mul, (self.rows, self.size, self.square), _terms(rows, size)))


#: How much of a shard's value is taken for chance, at least, and while too few are known to tell: standard
#: deviations.
LEAST_CHANCE, CHANCE = 0.01, 0.5

#: How far each term is from what is expected of it, in equal parts: a standard deviation. That long rows cost
#: more by size is a correction.
PRIOR = (1.0, 1.0, 0.1)


def fit(samples: Sequence[Sample]) -> Fit | None:
    """Return what is most likely, of terms that are not negative; None where nothing is known.

    Rows and size are expected to take equal parts, and squares nothing. How strongly, beside what is found,
    depends on how much of that is chance: on what a first fit leaves unexplained (ridge regression with its
    parameter from the data; Hoerl, Kennard and Baldwin 1975).
    """
    known = [each for each in samples if each.rows + each.size > 0]
    shares = fsum(each.weight * (each.rows + each.size) for each in known)
    value = fsum(each.weight * each.value for each in known)
    if shares <= 0 or value <= 0:
        return None
    middle = value / shares
    # Weighted by the inverse of what is expected: an end that is off by a second is so for any shard.
    weighted = [(each.weight / (each.rows + each.size), each) for each in known]
    unit = fsum(weight * (each.rows + each.size) ** 2 for weight, each in weighted) / len(known)
    first = _most_likely(weighted, middle, CHANCE**2 * unit)
    freedom = len(known) - 2
    if freedom <= 0:
        return first
    left = fsum(weight * (each.value - first.at(each.rows, each.size)) ** 2 for weight, each in weighted)
    all_ = fsum(weight * each.value**2 for weight, each in weighted)
    if all_ <= 0:  # the square of next to nothing is nothing
        return first
    chance = min(CHANCE**2, max(LEAST_CHANCE**2, left / all_ * len(known) / freedom))
    return _most_likely(weighted, middle, chance * unit)


def _terms(rows: float, size: float) -> tuple[float, float, float]:
    return rows, size, size * size / rows if rows > 0 else size


def _most_likely(weighted: Sequence[tuple[float, Sample]], middle: float, pull: float) -> Fit:
    """Return the minimum of the weighted squares and those of the distance from what is expected.

    pull: of a term that is as far from it as `middle`.
    """
    terms = [(weight, _terms(each.rows, each.size), each.value) for weight, each in weighted]
    several = range(len(PRIOR))
    matrix = [[fsum(weight * of[i] * of[k] for weight, of, _ in terms) for k in several] for i in several]
    right = [fsum(weight * of[i] * value for weight, of, value in terms) for i in several]
    for i, far in enumerate(PRIOR):
        matrix[i][i] += pull / far**2
        right[i] += pull / far**2 * (middle, middle, 0.0)[i]
    found = Fit(0.0, 0.0)
    least = 0.0
    for some in chain.from_iterable(combinations(several, count) for count in (1, 2, 3)):
        solved = _solve([[matrix[i][k] for k in some] for i in some], [right[i] for i in some])
        lowered = fsum(x * right[i] for i, x in zip(some, solved, strict=True))
        if lowered > least and min(solved) >= 0:
            of = dict(zip(some, solved, strict=True))
            found, least = Fit(*(of.get(i, 0.0) for i in several)), lowered
    return found


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve linear equations of a positive definite matrix by Gauss's elimination."""
    if not right:
        return []
    (pivot, *row), (value, *values) = matrix[0], right
    rest = [
        [below - first / pivot * beside for below, beside in zip(others, row, strict=True)]
        for first, *others in matrix[1:]
    ]
    below = [each - line[0] / pivot * value for each, line in zip(values, matrix[1:], strict=True)]
    solved = _solve(rest, below)
    return [(value - fsum(map(mul, row, solved))) / pivot, *solved]
