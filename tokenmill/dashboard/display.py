"""How numbers and times are written on the page."""

from datetime import UTC, datetime

from jobs.common.display import duration_text

#: What stands where nothing is known.
NOTHING = "–"


def number(value: float | None) -> str:
    """Return a count such as 12,345; a dash where it is not known."""
    return NOTHING if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Two digits and more: 0.42, 8.1, 1,234, 1.2 M."""
    if value is None:
        return NOTHING
    if value >= 1e6:
        return f"{value / 1e6:,.1f} M"
    if 0 < value < 10:
        return f"{value:.2f}" if value < 1 else f"{value:.1f}"
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Of a share from 0 to 1. Only what is whole reads 100 %."""
    if share is None:
        return NOTHING
    shown = min(round(share * 100), 99) if share < 1 else 100
    return f"{shown} %"


def duration(seconds: float | None) -> str:
    """Return a time in its two largest units."""
    return NOTHING if seconds is None else duration_text(seconds)


def moment(at: float | None) -> str:
    """A time of day, with its date where that is not today's, in UTC."""
    if at is None:
        return NOTHING
    then = datetime.fromtimestamp(at, UTC)
    today = datetime.now(UTC).date()
    return f"{then:%H:%M:%S}" if then.date() == today else f"{then:%Y-%m-%d %H:%M:%S}"


def iso(at: float) -> str:
    """For <time datetime>."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def share(part: float, whole: float | None) -> float | None:
    """A share from 0 to 1; None of nothing."""
    return min(1.0, part / whole) if whole else None
