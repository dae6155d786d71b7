"""How numbers and times are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill_dashboard import display


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (-5, "0 s"), (59.4, "59 s"), (65, "1 min 05 s"), (3600, "1 h 00 min"), (90000, "1 d 1 h")],
)
def test_a_duration_has_its_two_greatest_units(seconds: float | None, text: str) -> None:
    assert display.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.416, "0.42"), (8.06, "8.1"), (1234.4, "1,234"), (2.5e6, "2.5 M")],
)
def test_a_rate_has_the_digits_that_tell_something(value: float | None, text: str) -> None:
    assert display.rate(value) == text


@pytest.mark.parametrize(("part", "text"), [(0.0, "0 %"), (0.999, "99 %"), (1.0, "100 %"), (None, "–")])
def test_only_what_is_whole_is_a_hundred_percent(part: float | None, text: str) -> None:
    assert display.percent(part) == text


@given(st.floats(allow_nan=False))
def test_any_number_is_a_time_that_can_be_shown(at: float) -> None:
    assert display.moment(at)
    assert len(display.iso(at)) == 20
