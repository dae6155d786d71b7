"""The limits after which a worker leaves by itself, and the periods of its duties."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEASE_MARGIN_S = 45
"""A lease lasts --job-monitoring-interval plus these seconds. A sweep finds an expired lease within 10 s more. The
documentation promises 60 s for both."""


@dataclass(frozen=True)
class Limits:
    """One worker's limits. Times are in seconds. None means no limit."""

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
        """The number of worker deaths after which a job runs alone; infinite if the first death fails the job."""
        if self.max_worker_deaths <= 1:
            return float("inf")
        return self.max_worker_deaths - 1

    @property
    def renew_period_s(self) -> float:
        """Seconds between renewals of a lease.

        The period is short, so that a lease outlasts two failed renewals and a cancelled job is noticed soon.
        """
        return min(self.lease_s / 4, 2.0)

    @property
    def sweep_period_s(self) -> float:
        """Seconds between sweeps for abandoned jobs. An abandoned job waits for the next sweep before it runs again."""
        return min(self.lease_s / 4, 10.0)


class Timer:
    """Says when a period is over. `due` is true when it is first called."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._next = float("-inf")

    def postpone(self, moment: float) -> None:
        """Let the period end at `moment`, not before."""
        self._next = moment

    def end_now(self) -> None:
        """Let the period be over when `due` is called next."""
        self._next = float("-inf")

    def due(self, moment: float) -> bool:
        """Whether the period is over at `moment` (monotonic seconds). If so, the next period begins."""
        if moment < self._next:
            return False
        self._next = moment + self.period_s
        return True


POLL_S = 0.05
"""Seconds between a lane's polls for jobs while its queue has few workers."""

LONGEST_POLL_S = 2.0
"""Seconds between a lane's polls for jobs while its queue has very many workers."""

POLLS_PER_S = 200.0
"""The most polls of a queue in a second, by all its workers together. With many workers, each polls less often."""

PASSED_PER_S = 20_000.0
"""The most jobs that all polls of a queue together pass over in a second, because other workers must run them."""

MOST_PASSED = 1000
"""The most jobs that one poll passes over, see claim.lua."""

RENEWALS_PER_S = 1000.0
"""Renewals of leases in a second, by all workers of these queues together. With short leases there are more."""


class PollRates:
    """Sets the periods of polls and renewals. The more workers or begun jobs there are, the longer the periods.

    A lane is the rank of a queue; 0 is the most urgent. Used by the I/O thread only.
    """

    def __init__(
        self, queue_names: Sequence[str], limits: Limits, jitter: Callable[[], float] | None = None
    ) -> None:
        """jitter: returns a factor around 1, so that workers do not act in step. `note_load` draws a new factor."""
        self._queue_names = queue_names
        self._limits = limits
        self._jitter = jitter or (lambda: random.uniform(0.9, 1.1))
        self._num_workers = [1] * len(queue_names)
        self._num_started = 0
        self._factor = 1.0

    def note_load(self, num_workers: Mapping[str, int], num_started: int) -> None:
        """Note how many workers each queue has, and how many jobs of all the queues have begun."""
        self._num_workers = [max(1, num_workers.get(name, 1)) for name in self._queue_names]
        self._num_started = num_started
        self._factor = self._jitter()

    def num_workers(self, lane: int) -> int:
        """Return the number of workers that serve the lane's queue, including this one."""
        return self._num_workers[lane]

    def poll_s(self, lane: int, num_passed: int = 0) -> float:
        """Return the seconds between two polls of a lane that has room but has found no job in its queue.

        num_passed: jobs that the last poll passed over because other workers must run them. Each poll makes Redis read
        these jobs.
        """
        # The queue's period is the seconds between two polls of the queue, by all its workers together.
        period_for_passed_s = min(num_passed, MOST_PASSED) / PASSED_PER_S
        queue_period_s = max(1 / POLLS_PER_S, period_for_passed_s)
        wanted_s = self._num_workers[lane] * queue_period_s * self._factor
        return min(max(POLL_S, wanted_s), LONGEST_POLL_S)

    @property
    def renew_s(self) -> float:
        """The seconds between renewals of the held leases. The more leases there are, the longer the period.

        A renewal also finds cancelled jobs. So a cancelled job is found later if there are very many leases.
        """
        wanted_s = self._num_started / RENEWALS_PER_S * self._factor
        return min(max(self._limits.renew_period_s, wanted_s), self._limits.lease_s / 4)
