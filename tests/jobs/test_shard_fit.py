"""What shards will take, as a fit of finished ones tells it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jobs.runs.shard_fit import Fit, Sample, fit

COSTS = Fit(20.0, 10.0, 4.0)


def samples(costs: Fit, chance: float = 0.0, seed: int = 1) -> list[Sample]:
    """Forty shards of equal rows, of which the last have 24 times the size of the first."""
    rng = random.Random(seed)
    sizes = [1.0 + 0.015 * i**2 for i in range(40)]
    shares = [(1 / 40, size / sum(sizes)) for size in sizes]
    return [Sample(*of, costs.at(*of) * (1 + rng.gauss(0, chance))) for of in shares]


def error_of_the_rest(all_: list[Sample], known: int) -> float:
    """How far from the truth a fit of the first ones is about the others together."""
    found = fit(all_[:known])
    assert found is not None
    told = sum(found.at(each.rows, each.size) for each in all_[known:])
    return told / sum(each.value for each in all_[known:]) - 1


def test_long_rows_that_cost_more_by_size_are_told_by_shorter_ones() -> None:
    """A line through the first 22 says 15 % too little."""
    assert error_of_the_rest(samples(COSTS), 22) == pytest.approx(0, abs=0.1)


def test_what_is_chance_is_not_taken_for_a_law() -> None:
    """Of costs that follow rows and size alone."""
    line = replace(COSTS, square=0.0)
    for seed in range(5):
        assert error_of_the_rest(samples(line, 0.1, seed), 18) == pytest.approx(0, abs=0.25)


def test_equal_parts_are_taken_while_little_is_known() -> None:
    found = fit(samples(COSTS)[:1])
    assert found is not None
    assert found.rows == pytest.approx(found.size, rel=0.5)
    assert fit([]) is None
    assert fit([Sample(0.0, 0.0, 1.0)]) is None


def test_of_next_to_nothing_something_is_told() -> None:
    """Its square is nothing."""
    assert fit([Sample(0.25, 0.25, 1e-170)] * 4) is not None


def test_no_cost_is_negative() -> None:
    falling = [replace(each, value=1 / each.value) for each in samples(COSTS)]
    found = fit(falling)
    assert found is not None
    assert min(found.rows, found.size, found.square) >= 0
