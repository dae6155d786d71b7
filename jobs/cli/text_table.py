"""Tables of text, and how numbers and times stand in them."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return lines of columns. numbers: heads of the columns that stand to the right."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]

    def cell(place: int, text: str) -> str:
        width = widths[place]
        return text.rjust(width) if heads[place] in numbers else text.ljust(width)

    return "\n".join(
        "  ".join(cell(place, text) for place, text in enumerate(line)).rstrip() for line in lines
    )


def rate(value: float | None) -> str:
    """Return what is done a second."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def ago(seconds: float | None) -> str:
    """Return a span of time in its largest unit, "12 s" to "30 d"; "-" for none."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def left_cut(text: str, most: int) -> str:
    """Return a path's end, where that is what fits."""
    return text if len(text) <= most else f"...{text[3 - most :]}"
