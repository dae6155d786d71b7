"""Outcome: a job's end, for the store."""

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
"""See finish.lua; "refused": the server takes this end in no form."""


@dataclass(frozen=True)
class Outcome:
    """A job's end, for `JobStore.finish`."""

    claimed: ClaimedJob
    status: EndStatus
    value: Any
    """The return value of a finished job, the traceback text of another one."""
    ended_at: datetime
    working_s: float
    started_at: datetime | None = None
    """None for one that ended before it began."""
    retries: bool = False
    """Whether a failed job that has retries left takes one."""
    packed: bytes | None = None
    """The value's JSON, once it is to be written; None for a None, too."""
    changed_policy: Policy | None = None
    """Where the user's code had a copy of the job: what that says by now."""

    @property
    def num_bytes(self) -> int:
        """The known bytes of the value."""
        text = self.value if isinstance(self.value, str) and self.status != "finished" else ""
        return len(text if self.packed is None else self.packed)

    @property
    def is_final(self) -> bool:
        """Whether the job has no further try after a failure or stop like this."""
        return not (self.retries and self.policy.has_retries)

    @property
    def wish(self) -> RetryWish | None:
        """The `Retry` that the job returned, if any."""
        return self.value if isinstance(self.value, RetryWish) else None

    @property
    def policy(self) -> Policy:
        """The job's own wishes about running again and being kept."""
        return self.claimed.record.policy if self.changed_policy is None else self.changed_policy

    def next_step(self, default_result_ttl_s: int) -> NextStep:
        """Return the job's next step. default_result_ttl_s: see next_step.py."""
        return next_step(
            self.policy,
            is_finished=self.status == "finished",
            wish=self.wish,
            may_retry=self.retries,
            default_result_ttl_s=default_result_ttl_s,
        )

    def as_left_by(self, job: Job | None) -> Outcome:
        """Return the outcome with the policy in the user code's copy of the job, if it had one.

        Raises any error of values that no end can be written with, such as a text for `result_ttl`.
        """
        if job is None and self.claimed.damage is None:
            return self  # as it was read, and checked then
        outcome = self if job is None else replace(self, changed_policy=Policy.of(job))
        outcome.policy.check()
        outcome.next_step(0)
        return outcome

    def unwritable(self, error: Exception) -> Outcome:
        """Return the outcome of a job failed by an error of `as_left_by`, as with RQ's own worker."""
        text = printable(error)
        return replace(self, status="failed", value=text, retries=False, packed=None, changed_policy=Policy())
