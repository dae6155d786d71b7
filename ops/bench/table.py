"""Tables and spreads, without torch: what gathers the benches' results may run where they cannot."""

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, then least and most: "1.20 (1.10..1.40)"."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f}..{high:,.{digits}f})"


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table in Markdown, the first column to the left, the others to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in [cells[0], rule, *cells[1:]]:
        first, *rest = row
        columns = [first.ljust(widths[0])]
        columns += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("| " + " | ".join(columns) + " |", flush=True)
