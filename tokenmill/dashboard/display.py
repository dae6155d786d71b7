"""Formats numbers and times for pages. A value that is not known becomes a dash."""

from datetime import UTC, datetime

from jobs.common.display import duration_text

#: Stands for a value that is not known.
NOTHING = "–"


def number(value: float | None) -> str:
    """Return a count, such as 12,345."""
    return NOTHING if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Return a rate, such as 0.42, 8.1, 1,234 or 1.2 M."""
    if value is None:
        return NOTHING
    if value >= 1e6:
        return f"{value / 1e6:,.1f} M"
    if 1 <= value < 10:
        return f"{value:.1f}"
    if 0 < value < 1:
        return f"{value:.2f}"
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 in percent. A share below 1 is at most 99 %."""
    if share is None:
        return NOTHING
    if share >= 1:
        return "100 %"
    return f"{min(round(share * 100), 99)} %"


def size(num_bytes: float | None) -> str:
    """Return a size in MiB or GiB. The size 0 stands for one that is not known."""
    if not num_bytes:
        return NOTHING
    mib = num_bytes / (1 << 20)
    if mib >= 1024:
        return f"{mib / 1024:,.1f} GiB"
    return f"{mib:,.0f} MiB"


def duration(seconds: float | None) -> str:
    """Return a time span in its two largest units."""
    return NOTHING if seconds is None else duration_text(seconds)


def moment(at: float | None) -> str:
    """Return a time of day in UTC, with the date unless it is today. at: Unix seconds."""
    if at is None:
        return NOTHING
    then = datetime.fromtimestamp(at, UTC)
    if then.date() == datetime.now(UTC).date():
        return f"{then:%H:%M:%S}"
    return f"{then:%Y-%m-%d %H:%M:%S}"


def iso(at: float) -> str:
    """Return a time in the form of the attribute `datetime` of <time>. at: Unix seconds."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def share(part: float, whole: float | None) -> float | None:
    """Return the share of a part, at most 1; None if the whole is 0 or not known."""
    if not whole:
        return None
    return min(1.0, part / whole)
