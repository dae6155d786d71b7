"""Among how many workers the jobs of a queue are divided, when they are fewer than the places."""

from __future__ import annotations

from collections.abc import Sequence

FORGET_S = 10.0
"""After so long without a look in vain, all workers of the queue count as takers again."""


class FairShare:
    """How much of one lane this worker leaves to others. Used by the I/O thread alone.

    Each worker of a queue should find as many jobs, so that nobody holds the last ones while others wait
    (see claim.lua). But the others may be full, gone, or serve another model. This worker notices when the
    same job is still the first in the queue at its next look. It then rounds its share up; at the look after
    that it counts on half as many takers, and so on, up to what it has room for. Some seconds after the last
    such look it counts on all of them again.
    """

    def __init__(self) -> None:
        self._num_vain = 0
        self._first, self._seen_at = "", float("-inf")
        self._vain_at = float("-inf")

    def among(self, num_workers: int, moment: float) -> tuple[int, bool]:
        """How many takers to count on, of so many workers, and whether to round up, at `moment` (seconds)."""
        if moment - self._vain_at > FORGET_S:
            self._num_vain = 0
        return max(1, num_workers >> max(0, self._num_vain - 1)), self._num_vain > 0

    def left(self, first: str, moment: float, poll_s: float, taken: Sequence[str] = ()) -> None:
        """Hear which job a claim left to others as the first, "" for none. poll_s: how often they look.

        taken: which ones the claim took. Where the one that was left before is among them, nobody else has
        come: jobs that end before the others' next look would hide that for ever.
        """
        if not self._first or self._first not in (first, *taken):
            self._seen_at = moment
        elif first and moment - self._seen_at >= poll_s:
            self._num_vain += 1
            self._seen_at = self._vain_at = moment
        self._first = first
