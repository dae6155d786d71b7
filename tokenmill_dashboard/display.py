"""How numbers and times are written on the page."""

from datetime import UTC, datetime

#: What stands where nothing is known.
NOTHING = "–"


def number(value: float | None) -> str:
    """12,345; what is not known is a dash."""
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
    """The two greatest units: 3 s, 4 min 05 s, 2 h 10 min, 3 d 4 h."""
    if seconds is None:
        return NOTHING
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(at: float | None) -> str:
    """A time of day, with its date where that is not today's, in UTC."""
    if at is None:
        return NOTHING
    then = _utc(at)
    today = datetime.now(UTC).date()
    return f"{then:%H:%M:%S}" if then.date() == today else f"{then:%Y-%m-%d %H:%M:%S}"


def iso(at: float) -> str:
    """For <time datetime>."""
    return f"{_utc(at):%Y-%m-%dT%H:%M:%SZ}"


def share(part: float, whole: float | None) -> float | None:
    """A share from 0 to 1; None of nothing."""
    return min(1.0, part / whole) if whole else None


def _utc(at: float) -> datetime:
    try:
        return datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):  # others may write any number
        return datetime.fromtimestamp(0, UTC)
