"""When a periodic duty is due."""

from __future__ import annotations


class Timer:
    """Says when a period has passed; the first time at once."""

    def __init__(self, period_s: float) -> None:
        self.period_s, self._next = period_s, float("-inf")

    def postpone(self, moment: float) -> None:
        """Be due at `moment`, not before."""
        self._next = moment

    def due(self, moment: float) -> bool:
        """Whether the period is over at `moment` (monotonic seconds); starts the next one."""
        if moment < self._next:
            return False
        self._next = moment + self.period_s
        return True
