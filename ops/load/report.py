"""What a load scenario found, line by line, and which of its bounds were broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One figure. bound: what was allowed, empty for a figure that is only told. measured: it depends on the
    machine and its load, so that a test of the scenario's counts passes it over."""

    what: str
    found: str
    bound: str = ""
    ok: bool = True
    measured: bool = False


class Report:
    """The lines of one scenario, in order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.lines: list[Line] = []

    def tell(self, what: str, found: object) -> None:
        """Add a figure without a bound."""
        self.lines.append(Line(what, _text(found)))

    def equal(self, what: str, found: int, expected: int, measured: bool = False) -> None:
        """Add a count that can have one value only."""
        self.lines.append(Line(what, _text(found), f"= {_text(expected)}", found == expected, measured))

    def at_most(self, what: str, found: float, most: float, measured: bool = False) -> None:
        self.lines.append(Line(what, _text(found), f"≤ {_text(most)}", found <= most, measured))

    def at_least(self, what: str, found: float, least: float, measured: bool = False) -> None:
        self.lines.append(Line(what, _text(found), f"≥ {_text(least)}", found >= least, measured))

    def broken(self, measured: bool = True) -> list[Line]:
        """The lines whose bound does not hold. measured: False leaves out what depends on the machine."""
        return [line for line in self.lines if not line.ok and (measured or not line.measured)]

    def table(self) -> str:
        """The lines as text."""
        rows = [(line.what, line.found, line.bound, "" if line.ok else "BROKEN") for line in self.lines]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        body = [
            f"  {what:<{widths[0]}}  {found:>{widths[1]}}  {bound:<{widths[2]}}  {mark}".rstrip()
            for what, found, bound, mark in rows
        ]
        return "\n".join([self.title, *body])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
