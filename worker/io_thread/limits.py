"""When a worker leaves by itself, and how often it does its duties: less often among many workers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEASE_MARGIN_S = 45
"""Added to --job-monitoring-interval: with the sweep's period it stays within the promised 60 s."""


@dataclass(frozen=True)
class Limits:
    """One worker's limits; times in seconds."""

    burst: bool
    max_jobs: int | None
    max_idle_s: float | None
    lease_s: int
    max_worker_deaths: int
    max_stuck_threads: int
    drain_s: float | None
    journal_s: float = 10.0

    @property
    def suspect_deaths(self) -> float:
        """The number of deaths after which a job runs by itself; never, if the first is the last."""
        return self.max_worker_deaths - 1 if self.max_worker_deaths > 1 else float("inf")

    @property
    def renew_period_s(self) -> float:
        """Seconds between renewals: a lease survives two failed tries, and a cancelled job shows soon."""
        return min(self.lease_s / 4, 2.0)

    @property
    def sweep_period_s(self) -> float:
        """Seconds between looks for abandoned jobs, which add to the time to recovery."""
        return min(self.lease_s / 4, 10.0)


class Timer:
    """Says when a period has passed; the first time at once."""

    def __init__(self, period_s: float) -> None:
        self.period_s, self._next = period_s, float("-inf")

    def postpone(self, moment: float) -> None:
        """Let the period end at `moment`, not before."""
        self._next = moment

    def due(self, moment: float) -> bool:
        """Whether the period is over at `moment` (monotonic seconds); starts the next one."""
        if moment < self._next:
            return False
        self._next = moment + self.period_s
        return True


POLL_S, LONGEST_POLL_S = 0.05, 2.0
"""How often a lane with room looks for jobs: where workers are few, and where they are many."""

LOOKS_PER_S = 200.0
"""Of all the workers of a queue together, once they are more than a few: one of them finds a job as soon."""

PASSED_PER_S, MOST_PASSED = 20_000.0, 1000
"""Jobs that all these looks together pass over, because only other models or versions may run them; and the most that
one look passes, see claim.lua."""

RENEWALS_PER_S = 1000.0
"""Of the leases of all the workers of these queues, as far as leases are long enough."""


class PollRates:
    """The workers of the same queues, as last heard; their periods are drawn apart. Used by the I/O thread only."""

    def __init__(self, queue_names: Sequence[str], limits: Limits, jitter: Callable[[], float] | None = None) -> None:
        """jitter: a factor around 1, drawn each time that it hears."""
        self._queue_names, self._limits = queue_names, limits
        self._jitter = jitter or (lambda: random.uniform(0.9, 1.1))
        self._num_workers = [1] * len(queue_names)
        self._num_started, self._factor = 0, 1.0

    def hear(self, num_workers: Mapping[str, int], num_started: int) -> None:
        """Take in how many workers each queue has, and how many jobs of all of them have begun."""
        self._num_workers = [max(1, num_workers.get(name, 1)) for name in self._queue_names]
        self._num_started, self._factor = num_started, self._jitter()

    def num_workers(self, lane: int) -> int:
        """Return the number of workers that serve the lane's queue, this one among them."""
        return self._num_workers[lane]

    def poll_s(self, lane: int, num_passed: int = 0) -> float:
        """Return the seconds between looks for jobs of a lane with room, after a look that found none.

        num_passed: jobs that it passed over, as others must run them: the server reads them at each look.
        """
        look_s = max(1 / LOOKS_PER_S, min(num_passed, MOST_PASSED) / PASSED_PER_S)
        wished_s = self._num_workers[lane] * look_s * self._factor
        return min(max(POLL_S, wished_s), LONGEST_POLL_S)

    @property
    def renew_s(self) -> float:
        """Return the seconds between renewals of the held leases; of very many, a cancelled job may show later."""
        wished_s = self._num_started / RENEWALS_PER_S * self._factor
        return min(max(self._limits.renew_period_s, wished_s), self._limits.lease_s / 4)
