"""What comes next for an ended job follows from what it says and how it ended alone."""

from __future__ import annotations

from typing import Any

import pytest

from worker.store.records.next_step import End, Policy, next_step

YEAR_S = 365 * 86_400


def finished(policy: Policy, **how: Any) -> Any:
    return next_step(policy, is_finished=True, **how)


@pytest.mark.parametrize(
    ("ttl", "kept_s"), [(None, 77), (0, 0), (60, 60), (-1, -1), (-5, -1), (10**12, 10 * YEAR_S)]
)
def test_a_result_is_kept_as_long_as_its_job_says(ttl: int | None, kept_s: int) -> None:
    assert finished(Policy(result_ttl=ttl), default_result_ttl_s=77) == End(kept_s)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(result_ttl="soon"),  # type: ignore[arg-type]
        Policy(failure_ttl={"soon": 1}),  # type: ignore[arg-type]
        Policy(retries_left=1, retry_intervals=[]),
        Policy(retries_left=1, retry_intervals=["soon"]),  # type: ignore[list-item]
        Policy(repeats_left=1, repeat_intervals=[None]),  # type: ignore[list-item]
    ],
)
def test_a_policy_that_no_end_can_be_written_with_is_told_before(policy: Policy) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        policy.check()
