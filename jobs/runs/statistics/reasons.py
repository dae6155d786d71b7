"""Why rows have errors: the kinds of reasons, how many rows each, and examples."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_REASON_CHARS = 200

#: Kinds that are told apart; rows of further ones are counted together.
MAX_KINDS = 1000
OTHERS = "other reasons"

MAX_EXAMPLES = 3


@dataclass
class Reason:
    """Rows with one error: the first one's text, how many, and the first ones' numbers over the whole input."""

    text: str
    rows: int = 0
    examples: list[int] = field(default_factory=list)


class Reasons:
    """Counts rows by reason; texts that differ in their numbers alone are one reason."""

    def __init__(self) -> None:
        self._found: dict[str, Reason] = {}

    @property
    def rows(self) -> int:
        return sum(reason.rows for reason in self._found.values())

    def add(self, text: str, rows: Sequence[int], count: int | None = None) -> None:
        """Count rows of one reason. rows: ascending numbers; count: how many, where not all are named."""
        text = text[:MAX_REASON_CHARS]
        kind = re.sub(r"\d+", "0", text)
        if kind not in self._found and len(self._found) >= MAX_KINDS:
            kind = text = OTHERS
        reason = self._found.setdefault(kind, Reason(text))
        if rows and reason.examples and rows[0] < reason.examples[0]:
            reason.text = text
        reason.rows += len(rows) if count is None else count
        reason.examples = sorted([*reason.examples, *rows[:MAX_EXAMPLES]])[:MAX_EXAMPLES]

    def commonest(self, most: int) -> list[Reason]:
        """Return at most so many, the commonest first; of equal ones that with the first row."""
        return sorted(self._found.values(), key=lambda each: (-each.rows, each.examples))[:most]

    def told(self, most: int) -> list[dict[str, Any]]:
        return [{"reason": each.text, "rows": each.rows, "examples": each.examples} for each in self.commonest(most)]
