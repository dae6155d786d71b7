"""What comes next for an ended job follows from what it says and how it ended alone."""

from __future__ import annotations

from typing import Any

import pytest
from rq.job import Retry as RetryWish

from worker.store.records.next_step import End, Policy, Repeat, Retry, next_step

YEAR_S = 365 * 86_400


def failed(policy: Policy, **how: Any) -> Any:
    return next_step(policy, is_finished=False, may_retry=True, **how)


def finished(policy: Policy, **how: Any) -> Any:
    return next_step(policy, is_finished=True, **how)


def test_a_failed_job_that_has_retries_takes_one_and_waits_the_interval_of_its_turn() -> None:
    waits = []
    for left in (3, 2, 1):
        step = failed(Policy(retries_left=left, retry_intervals=[10, 20, 30]))
        assert (step.counter, step.count, step.is_on_wish) == ("retries_left", left - 1, False)
        waits.append(step.wait_s)
    assert waits == [10, 20, 30]


def test_tries_beyond_the_intervals_wait_the_first_one() -> None:
    assert failed(Policy(retries_left=5, retry_intervals=[10, 20])).wait_s == 10


def test_a_retry_without_an_interval_is_at_once_and_at_the_front_only_where_the_job_says_so() -> None:
    assert failed(Policy(retries_left=1)) == Retry(0, False, "retries_left", 0, False, None)
    front = Policy(retries_left=1, enqueue_at_front_on_retry=True, failure_ttl=60)
    assert failed(front) == Retry(0, True, "retries_left", 0, False, 60)


@pytest.mark.parametrize("retries_left", [None, 0, -1])
def test_a_failed_job_without_retries_has_ended(retries_left: int | None) -> None:
    assert failed(Policy(retries_left=retries_left)) == End(YEAR_S)


def test_a_failure_that_another_try_would_repeat_takes_no_retry() -> None:
    assert next_step(Policy(retries_left=3), is_finished=False, may_retry=False) == End(YEAR_S)


def test_a_job_that_returns_a_retry_runs_again_until_it_has_had_them_all() -> None:
    wish = RetryWish(2, interval=[5, 7])
    tries = [finished(Policy(number_of_retries=done), wish=wish) for done in (None, 1, 2)]
    assert tries[0] == Retry(5, False, "number_of_retries", 1, True, None)
    assert tries[1] == Retry(7, False, "number_of_retries", 2, True, None)
    assert tries[2] == End(YEAR_S, has_used_up_retries=True)
    assert finished(Policy(), wish=RetryWish(2, enqueue_at_front=True)).at_front


def test_a_returned_retry_counts_for_itself_and_not_against_the_retries_left() -> None:
    policy = Policy(retries_left=4, repeats_left=4)
    assert finished(policy, wish=RetryWish(1)).counter == "number_of_retries"
    used_up = Policy(retries_left=4, repeats_left=4, number_of_retries=1)
    assert finished(used_up, wish=RetryWish(1), may_retry=True) == End(YEAR_S, has_used_up_retries=True)


def test_a_finished_job_repeats_as_often_as_it_says() -> None:
    policy = Policy(repeats_left=3, repeat_intervals=[10, 20], result_ttl=60)
    assert finished(policy) == Repeat(10, 2, 60)
    assert finished(Policy(repeats_left=1, repeat_intervals=[20])) == Repeat(20, 0, 500)
    assert finished(Policy(repeats_left=1)) == Repeat(0, 0, 500)
    assert failed(policy) == End(YEAR_S)


@pytest.mark.parametrize(
    ("ttl", "kept_s"), [(None, 77), (0, 0), (60, 60), (-1, -1), (-5, -1), (10**12, 10 * YEAR_S)]
)
def test_a_result_is_kept_as_long_as_its_job_says(ttl: int | None, kept_s: int) -> None:
    assert finished(Policy(result_ttl=ttl), default_result_ttl_s=77) == End(kept_s)


@pytest.mark.parametrize(("ttl", "kept_s"), [(None, YEAR_S), (0, 0), (60, 60), (-1, -1)])
def test_a_failed_job_is_kept_as_long_as_it_says(ttl: int | None, kept_s: int) -> None:
    assert failed(Policy(failure_ttl=ttl, result_ttl=5)) == End(kept_s)


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
