"""Reads the deadlines of runs and jobs."""

import re
import time
from datetime import datetime, timedelta
from typing import Any

from jobs.errors import wrong_value_error

#: The error of a row that was not begun before the run's deadline.
EXPIRED = "the deadline passed before this row was begun"

#: A deadline, in any form that parse_deadline reads.
Deadline = str | float | datetime | timedelta

_DURATION = re.compile(r"(?P<count>\d{1,6})(?P<unit>[smhd])", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
#: The earliest deadline as a number of Unix seconds. A smaller number is refused, because it may mean seconds from now.
_EARLIEST = 1e9
#: The latest deadline, in Unix seconds.
_LATEST = 1e11
_FORMS = (
    "a duration from now like 90s, 15m, 2h or 7d, a time like 2026-12-01T08:00:00+01:00, "
    "or Unix seconds like 1800000000"
)


def parse_deadline(name: str, value: Any, now: float | None = None) -> float:
    """Return a deadline in Unix seconds. Raises InvalidJob.

    value: a duration (a text like "2h", or a timedelta), Unix seconds, or a time with its offset (ISO 8601, or a
    datetime). now: Unix seconds, from which a duration counts; by default the present time.
    """
    start = time.time() if now is None else now
    moment: float | None = None
    if isinstance(value, str):
        moment = _moment(value.strip(), start)
    elif isinstance(value, timedelta):
        moment = start + value.total_seconds()
    elif isinstance(value, datetime) and value.tzinfo is not None:
        moment = value.timestamp()
    elif type(value) in (int, float) and value >= _EARLIEST:
        moment = value
    if moment is None or not 0 < moment < _LATEST:
        raise wrong_value_error(name, value, _FORMS)
    return float(moment)


def _moment(text: str, now: float) -> float | None:
    """Read a duration from now, or a time with its offset. Return Unix seconds, or None for any other text."""
    duration = _DURATION.fullmatch(text)
    if duration:
        return now + int(duration["count"]) * _UNIT_S[duration["unit"]]
    try:
        moment = datetime.fromisoformat(text)
        return None if moment.tzinfo is None else moment.timestamp()
    except (ValueError, OverflowError):
        return None
