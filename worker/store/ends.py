"""The script call that writes the end of a job, or its next try, as RQ writes it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import Redis
from rq.defaults import DEFAULT_RESULT_TTL
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import utcformat

from worker.store.records.next_step import End, Repeat, Retry
from worker.store.records.outcome import Outcome


@dataclass(frozen=True)
class Keeping:
    """What is kept of jobs that have ended.

    records_failures: False keeps failed jobs out of the registry and without a result, as RQ's
    --disable-default-exception-handler does.  result_ttl_s: of jobs that do not say.
    """

    records_failures: bool = True
    result_ttl_s: int = DEFAULT_RESULT_TTL


class EndCalls:
    """Makes the calls of one worker. See `JobStore` for the arguments."""

    def __init__(self, client: Redis, worker_name: str, keeping: Keeping, clock: Callable[[], float]) -> None:
        self._client, self._worker_name, self._keeping, self._clock = client, worker_name, keeping, clock

    def call_of(self, outcome: Outcome) -> tuple[str, list[Any]]:
        """Name and arguments of the script that writes this outcome."""
        step = outcome.next_step(self._keeping.result_ttl_s)
        if isinstance(step, Retry):
            return "retry", self._retry_args(outcome, step)
        return "finish", self._finish_args(outcome, step)

    def _run_args(self, outcome: Outcome) -> list[Any]:
        """What both scripts are told of the run: see end_execution.lua."""
        started_iso = utcformat(outcome.started_at or outcome.ended_at)
        run = (utcformat(outcome.ended_at), self._worker_name, outcome.working_s, started_iso)
        return [*outcome.claimed.address, *run]

    def _retry_args(self, outcome: Outcome, step: Retry) -> list[Any]:
        entry = self._entry(outcome, Result.Type.RETRIED) if step.is_on_wish else []
        kept_s = "" if step.kept_s is None else step.kept_s
        when = self._when(step.wait_s, step.at_front)
        return [*self._run_args(outcome), when, step.counter, step.count, kept_s, int(step.at_front), *entry]

    def _finish_args(self, outcome: Outcome, step: Repeat | End) -> list[Any]:
        status, kind = _status_and_kind(outcome, step)
        repeat = [self._when(step.wait_s), step.left] if isinstance(step, Repeat) else ["", ""]
        if status == "finished":
            is_recorded, left_ttl_s, endless = step.kept_s != 0, "0", "+inf"
        else:  # as RQ scores failed ones: those without end by the negative ttl
            is_recorded = self._keeping.records_failures or kind is not Result.Type.FAILED
            left_ttl_s, endless = "", str(step.kept_s)
        if not is_recorded:
            return [*self._run_args(outcome), status, left_ttl_s, "", *repeat]
        score = endless if step.kept_s < 0 else repr(self._clock() + step.kept_s)
        entry = self._entry(outcome, kind)
        return [*self._run_args(outcome), status, step.kept_s, score, *repeat, *entry]

    def _when(self, wait_s: int, at_front: bool = False) -> str | int:
        """When a job runs again, as put_back of end_execution.lua takes it."""
        if wait_s:
            return int(self._clock() + wait_s)
        return "front" if at_front else "back"

    def _entry(self, outcome: Outcome, kind: Result.Type) -> list[Any]:
        """Fields and values of the entry in rq:results."""
        claimed, failed = outcome.claimed, kind is Result.Type.FAILED
        result = Result(
            claimed.job_id,
            kind,
            connection=self._client,
            return_value=outcome.wish,
            exc_string=outcome.value if failed else None,
            worker_name=self._worker_name,
            execution_id=claimed.execution_id,
            execution_started_at=outcome.started_at or outcome.ended_at,
            execution_ended_at=outcome.ended_at,
        )
        result.serializer = JSONSerializer  # given to the constructor it would be inspected each time
        fields = result.serialize()
        if not failed and outcome.packed is not None:
            fields["return_value"] = b64encode(outcome.packed)
        return [item for pair in fields.items() for item in pair]


def _status_and_kind(outcome: Outcome, step: Repeat | End) -> tuple[str, Result.Type]:
    """Status of the job, and kind of its result."""
    if isinstance(step, End) and step.has_used_up_retries:
        return "failed", Result.Type.MAX_RETRIES_EXCEEDED
    is_finished = outcome.status == "finished"
    return outcome.status, Result.Type.SUCCESSFUL if is_finished else Result.Type.FAILED
