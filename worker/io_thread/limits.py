"""When a worker leaves by itself, the periods of its duties, and the timer that keeps them."""

from __future__ import annotations

from dataclasses import dataclass

LEASE_MARGIN_S = 45
"""Added to --job-monitoring-interval: with the sweep's period it stays within the promised 60 s."""


@dataclass(frozen=True)
class Limits:
    """Of one worker; times in seconds."""

    burst: bool
    max_jobs: int | None
    max_idle_s: float | None
    lease_s: int
    max_worker_deaths: int
    max_stuck_threads: int
    drain_s: float | None

    @property
    def suspect_deaths(self) -> float:
        """Deaths after which a job runs by itself; never, where the first death is the last."""
        return self.max_worker_deaths - 1 if self.max_worker_deaths > 1 else float("inf")

    @property
    def renew_period_s(self) -> float:
        """Often enough that a lease survives two failed tries, and that a cancelled job is noticed soon."""
        return min(self.lease_s / 4, 2.0)

    @property
    def longest_renew_s(self) -> float:
        """Where so many leases are renewed that a cancelled job has to be noticed later."""
        return self.lease_s / 4

    @property
    def sweep_period_s(self) -> float:
        """How often abandoned jobs are looked for: adds to the lease in the time to recovery."""
        return min(self.lease_s / 4, 10.0)


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
