"""Decides what follows when a job ends: it runs again, at once or later, or it stays ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from rq.defaults import DEFAULT_FAILURE_TTL, DEFAULT_RESULT_TTL
from rq.job import Job, Retry

_MAX_TTL_S = 10 * 365 * 86_400
"""The longest time to live. Redis would refuse a longer time in the middle of a script."""


@dataclass(frozen=True)
class Policy:
    """A job's own settings about running again and being kept, with RQ's names and meanings."""

    result_ttl: int | None = None
    failure_ttl: int | None = None
    retries_left: int | None = None
    number_of_retries: int | None = None
    retry_intervals: Sequence[int] | None = None
    enqueue_at_front_on_retry: bool | None = False
    repeats_left: int | None = None
    repeat_intervals: Sequence[int] | None = None

    @classmethod
    def of(cls, job: Job) -> Policy:
        """Read the policy from a copy of the job. The user's code may have put any values there (see `check`)."""
        values = {field.name: getattr(job, field.name) for field in fields(cls)}
        return cls(**values)

    def put_on(self, job: Job) -> None:
        """Write the policy into a copy of the job, for the user's code to read and change."""
        for field in fields(self):
            setattr(job, field.name, getattr(self, field.name))

    @property
    def has_retries(self) -> bool:
        """Whether the job runs again after a failure."""
        return self.retries_left is not None and self.retries_left > 0

    @property
    def retry_wait_s(self) -> int:
        """The seconds until the next retry. The job must have retries left.

        If there are more retries than intervals, the first retries share the first interval.
        """
        if self.retry_intervals is None:
            return 0
        assert self.retries_left
        position = max(len(self.retry_intervals) - self.retries_left, 0)
        return _seconds(self.retry_intervals[position])

    def grants(self, returned_retry: Retry) -> bool:
        """Whether a job that returned this `Retry` runs again."""
        return (self.number_of_retries or 0) < returned_retry.max

    def check(self) -> None:
        """Raise an error of any class if a value cannot be used. Users may have given anything."""
        if self.has_retries:
            _ = self.retry_wait_s  # raises if an interval cannot be used
        if self.repeats_left and self.repeats_left > 0:
            for interval_s in self.repeat_intervals or ():
                _seconds(interval_s)  # raises if the interval cannot be used
        for ttl_s in (self.result_ttl, self.failure_ttl):
            _bounded_ttl(ttl_s or 0)  # raises if the time to live cannot be used


@dataclass(frozen=True)
class NextStep:
    """What becomes of an ended job.

    kept_s: seconds for which the job is kept. If the job is retried, its earlier results are kept for this long. A
    negative number means for ever. None leaves the time to live as it is.
    wait_s: seconds until the job runs again; None if it does not run again.
    counter: the field of the job's hash that counts its retries or repeats. count: the field's new value.
    at_front: whether the job goes to the front of its queue.
    """

    kept_s: int | None
    wait_s: int | None = None
    counter: Literal["", "number_of_retries", "retries_left", "repeats_left"] = ""
    count: int = 0
    at_front: bool = False


def next_step(
    policy: Policy,
    *,
    is_finished: bool,
    returned_retry: Retry | None = None,
    may_retry: bool = False,
    default_result_ttl_s: int = DEFAULT_RESULT_TTL,
) -> NextStep:
    """Return the next step of a job that has finished, failed or was stopped.

    returned_retry: the `Retry` that the job returned. may_retry: whether a failed job may use one of its retries.
    default_result_ttl_s: seconds for which the result is kept if the policy does not say. Raises an error of any class
    if the policy is damaged.
    """
    failure_ttl_s = None
    if policy.failure_ttl is not None:
        failure_ttl_s = _bounded_ttl(policy.failure_ttl)
    if returned_retry is not None and policy.grants(returned_retry):
        return _returned_retry_step(policy, returned_retry, failure_ttl_s)
    if returned_retry is None and may_retry and policy.has_retries:
        return _retry_step(policy, failure_ttl_s)

    # A job that has returned a `Retry` once too often has failed, although it did not raise.
    has_failed = returned_retry is not None or not is_finished
    if has_failed:
        if failure_ttl_s is None:
            failure_ttl_s = DEFAULT_FAILURE_TTL
        return NextStep(kept_s=failure_ttl_s)

    result_ttl_s = policy.result_ttl
    if result_ttl_s is None:
        result_ttl_s = default_result_ttl_s
    kept_s = _bounded_ttl(result_ttl_s)
    if not policy.repeats_left or policy.repeats_left < 0:
        return NextStep(kept_s=kept_s)
    wait_s = 0
    if policy.repeat_intervals:
        wait_s = _seconds(policy.repeat_intervals[0])
    return NextStep(
        kept_s=kept_s, wait_s=wait_s, counter="repeats_left", count=policy.repeats_left - 1
    )


def _returned_retry_step(
    policy: Policy, returned_retry: Retry, failure_ttl_s: int | None
) -> NextStep:
    """Return the step of a job that runs again because it returned a `Retry`."""
    num_retries = policy.number_of_retries or 0
    wait_s = _seconds(Retry.get_interval(num_retries, returned_retry.intervals))
    at_front = bool(policy.enqueue_at_front_on_retry or returned_retry.enqueue_at_front)
    return NextStep(
        kept_s=failure_ttl_s,
        wait_s=wait_s,
        counter="number_of_retries",
        count=num_retries + 1,
        at_front=at_front,
    )


def _retry_step(policy: Policy, failure_ttl_s: int | None) -> NextStep:
    """Return the step of a failed job that uses one of its retries."""
    assert policy.retries_left
    return NextStep(
        kept_s=failure_ttl_s,
        wait_s=policy.retry_wait_s,
        counter="retries_left",
        count=policy.retries_left - 1,
        at_front=bool(policy.enqueue_at_front_on_retry),
    )


def _seconds(interval_s: Any) -> int:
    """Return an interval as whole seconds, at least 0 and at most _MAX_TTL_S. Raises an error if it is no number."""
    return max(0, min(int(interval_s), _MAX_TTL_S))


def _bounded_ttl(ttl_s: int) -> int:
    """Return a time to live that Redis accepts. A negative time becomes -1, which means for ever."""
    return max(-1, min(int(ttl_s), _MAX_TTL_S))
