"""Outcome: how a job ended, for the store to write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from rq.job import Job
from rq.job import Retry as RetryWish

from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.next_step import NextStep, Policy, next_step
from worker.store.records.results import printable

EndStatus = Literal["finished", "failed", "stopped"]
FinishReply = Literal["done", "again", "lost", "dependents", "refused"]
"""See finish.lua. "refused" means that the server takes this end in no form."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended, for `JobStore.finish`."""

    claimed: ClaimedJob
    status: EndStatus
    value: Any
    """The return value of a finished job, or the traceback of a failed or stopped one."""
    ended_at: datetime
    working_s: float
    started_at: datetime | None = None
    """None for a job that ended before it began."""
    retries: bool = False
    """Whether a failed job with retries left uses one."""
    packed: bytes | None = None
    """The value as JSON, once it is packed. None also stands for the value None."""
    changed_policy: Policy | None = None
    """The policy in the user code's copy of the job; None if there is no copy."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed value or traceback; 0 while a value is not packed."""
        if self.packed is not None:
            return len(self.packed)
        if self.status != "finished" and isinstance(self.value, str):
            return len(self.value)
        return 0

    @property
    def is_final(self) -> bool:
        """Whether this is the last try of a job that failed or was stopped."""
        return not (self.retries and self.policy.has_retries)

    @property
    def wish(self) -> RetryWish | None:
        """The `Retry` that the job returned, if any."""
        return self.value if isinstance(self.value, RetryWish) else None

    @property
    def policy(self) -> Policy:
        """The job's own settings about running again and being kept."""
        return self.claimed.record.policy if self.changed_policy is None else self.changed_policy

    def next_step(self, default_result_ttl_s: int) -> NextStep:
        """Return what becomes of the job now. default_result_ttl_s: see next_step.py."""
        return next_step(
            self.policy,
            is_finished=self.status == "finished",
            wish=self.wish,
            may_retry=self.retries,
            default_result_ttl_s=default_result_ttl_s,
        )

    def as_left_by(self, job: Job | None) -> Outcome:
        """Return the outcome with the policy of the user code's copy of the job, if there is one.

        Raises any error if its values cannot be used to write an end, such as a text for `result_ttl`.
        """
        if job is None and self.claimed.damage is None:
            return self  # the policy was checked when it was read
        outcome = self if job is None else replace(self, changed_policy=Policy.of(job))
        outcome.policy.check()
        outcome.next_step(0)
        return outcome

    def unwritable(self, error: Exception) -> Outcome:
        """Return the outcome of a job that fails with an error of `as_left_by`, as with RQ's own worker."""
        text = printable(error)
        return replace(
            self, status="failed", value=text, retries=False, packed=None, changed_policy=Policy()
        )
