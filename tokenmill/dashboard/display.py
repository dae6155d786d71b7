"""Writes numbers and times as the page shows them."""

from datetime import UTC, datetime

from jobs.common.display import duration_text

#: Stands for a value that is not known.
NOTHING = "–"


def number(value: float | None) -> str:
    """Return a count such as 12,345; a dash if it is not known."""
    return NOTHING if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Return a rate with at least two digits: 0.42, 8.1, 1,234, 1.2 M."""
    if value is None:
        return NOTHING
    if value >= 1e6:
        return f"{value / 1e6:,.1f} M"
    if 0 < value < 10:
        return f"{value:.2f}" if value < 1 else f"{value:.1f}"
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 in percent. Only a whole reads 100 %."""
    if share is None:
        return NOTHING
    shown = min(round(share * 100), 99) if share < 1 else 100
    return f"{shown} %"


def size(num_bytes: float | None) -> str:
    """Return a size in bytes as MiB or GiB; a dash if it is not known."""
    if not num_bytes:
        return NOTHING
    mib = num_bytes / (1 << 20)
    return f"{mib / 1024:,.1f} GiB" if mib >= 1024 else f"{mib:,.0f} MiB"


def duration(seconds: float | None) -> str:
    """Return a time in its two largest units."""
    return NOTHING if seconds is None else duration_text(seconds)


def moment(at: float | None) -> str:
    """Return a time of day in UTC, with the date if that is not today."""
    if at is None:
        return NOTHING
    then = datetime.fromtimestamp(at, UTC)
    today = datetime.now(UTC).date()
    return f"{then:%H:%M:%S}" if then.date() == today else f"{then:%Y-%m-%d %H:%M:%S}"


def iso(at: float) -> str:
    """Return a time in the form that <time datetime> takes."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def share(part: float, whole: float | None) -> float | None:
    """Return a share from 0 to 1; None if there is no whole."""
    return min(1.0, part / whole) if whole else None
