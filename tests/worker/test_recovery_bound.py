"""A dead worker's jobs are queued again within --job-monitoring-interval + 60 s, whatever the interval."""

from __future__ import annotations

import pytest

from worker.io_thread.limits import LEASE_MARGIN_S, Limits
from worker.io_thread.poll_rates import LONGEST_POLL_S

PROMISED_S = 60


@pytest.mark.parametrize("interval_s", [1, 30, 600])
def test_lease_and_sweep_keep_the_promised_time_to_recovery(interval_s: int) -> None:
    limits = Limits(
        burst=False,
        max_jobs=None,
        max_idle_s=None,
        lease_s=interval_s + LEASE_MARGIN_S,
        max_worker_deaths=5,
        max_stuck_threads=16,
        drain_s=None,
    )
    # At worst the worker dies right after it renewed, and the lease ends right after a sweep.
    worst_s = limits.lease_s + limits.sweep_period_s + LONGEST_POLL_S
    assert worst_s <= interval_s + PROMISED_S
    assert limits.renew_period_s * 2 < limits.lease_s
