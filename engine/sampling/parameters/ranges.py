"""What one sampling value may be, and how a value that may not is shown."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

from engine.errors import InvalidSampling

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """What an integer or a number may be, ends included."""

    low: float
    high: float
    integer: bool

    def check(self, name: str, value: object) -> None:
        """Raise InvalidSampling unless the value of `name` is of its kind and in range."""
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            kind = "an integer" if self.integer else "a number"
            raise InvalidSampling(f"{name} must be {kind}{_hint(value)}", brief(value))
        if not self.low <= value <= self.high:  # not a number is between no two
            raise InvalidSampling(f"{name} must be between {self.low} and {self.high}", brief(value))


TOKEN_ID = Range(0, MAX_COUNT, integer=True)


def check_switch(name: str, value: object) -> None:
    """Raise InvalidSampling unless the value of `name` is true or false."""
    if not isinstance(value, bool):
        raise InvalidSampling(f"{name} must be true or false", brief(value))


def brief(value: object) -> str:
    """The value as Python writes it, in short: it may be as long as a prompt."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"one of type {type(value).__name__} with a number too long to show"


def _hint(value: object) -> str:
    return " and no text: write it without quotes" if isinstance(value, str) else ""
