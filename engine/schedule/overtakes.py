"""Overtakes: how often each waiting lane has been overtaken, so that none is for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MAX_OVERTAKES = 19  # a waiting lane gets at least one admission in twenty


class Overtakes(Counter[int]):
    """Admissions of more urgent lanes since a lane's own last one, by lane."""

    def count_admission(self, lane: int, others: Iterable[int]) -> None:
        """Count one admission from `lane` against those of `others` that are less urgent."""
        self.update({other for other in others if other > lane})

    def take_due(self, lane: int) -> list[int]:
        """The lanes overtaken too often that are less urgent than `lane`; they are counted anew."""
        due = [other for other, n in self.items() if other > lane and n >= MAX_OVERTAKES]
        for other in due:
            del self[other]
        return due
