"""Tells of a run's end: an HTTP call, or a function of the user's, as jobs on the run's queue.

Each submission that asks for it is told of once its run has finished, was stopped or was cancelled. The jobs
are enqueued before the shard's job ends that ended the run, in one transaction with a mark: after a worker
that was killed in between the shard runs again, which enqueues them. A cancel enqueues them last; one that
did not come through does when it is repeated. A job may run twice, as any may whose worker dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..common import stored
from ..common.keys import run_key
from ..common.rq_jobs import JobQueue, retries
from .end_calls import ASKED_FOR, TOLD
from .lock import transact
from .plan import Plan
from .state import RunState
from .state_values import Verdict

if TYPE_CHECKING:
    from redis.client import Pipeline

#: The function that posts.
POSTING = "jobs.post_run_end"

#: As RQ's default for jobs, then days to look at what became of them.
TIMEOUT_S, RESULT_TTL_S, FAILURE_TTL_S = 180, 24 * 3600, 7 * 24 * 3600

#: Tries of a job that failed, each at the end of its queue.
RETRIES = 3


def tell_end(state: RunState, plan: Plan, verdict: Verdict | None = None) -> None:
    """Enqueue what the last submission asks for, unless it was told of.

    verdict: why the run is stopped, and which submission that is of; None where the run has finished.
    """
    submission = state.submission() if verdict is None else verdict.submission
    word, reason = ("finished", None) if verdict is None else ("stopped", verdict.reason)
    size = {"output": plan.spec.output, "rows": plan.rows, "shards": len(plan.shards)}
    _tell_of(state, submission, word, reason, size)


def tell_cancelled(state: RunState, submission: int) -> None:
    """Enqueue what a submission asks for that was cancelled by a person, unless it was told of.

    Raises UnknownRun.
    """
    facts = state.facts()
    rows, shards = (stored.count(facts.get(name)) for name in ("rows", "shards"))
    size = {"output": facts["output"], "rows": rows, "shards": shards}
    _tell_of(state, submission, "cancelled", None, size)


def _tell_of(
    state: RunState, submission: int, word: str, reason: str | None, size: Mapping[str, Any]
) -> None:
    """size: output, rows and shards; None where the run was not planned."""
    key = run_key(state.run)
    asked_for: Any = state.connection.hmget(key, *ASKED_FOR)
    if not any(asked_for):
        return
    parts = state.parts().values()
    content = {
        "run": state.run,
        "state": word,
        "output": size["output"],
        "rows": size["rows"],
        "rows_done": sum(part.rows for part in parts),
        "errors": sum(part.errors for part in parts),
        "shards": size["shards"],
        "reason": reason,
    }
    transact(state.connection, lambda pipe: _tell(pipe, state, submission, content), key)


def _tell(pipe: Pipeline, state: RunState, submission: int, content: Mapping[str, Any]) -> None:
    key = run_key(state.run)
    found: Any = pipe.hmget(key, *ASKED_FOR, TOLD, "submission", "queue")
    webhook, on_end, told, last, queue = (None if each is None else stored.text(each) for each in found)
    if queue is None or str(submission) != last or told == last:
        return
    pipe.multi()
    jobs = JobQueue(state.connection, queue)
    if webhook is not None:
        _enqueue(jobs, pipe, POSTING, (webhook, dict(content)), f"{state.run}-webhook-{submission}")
    if on_end is not None:
        _enqueue(jobs, pipe, on_end, (dict(content),), f"{state.run}-end-{submission}")
    pipe.hset(key, TOLD, str(submission))
    pipe.execute()


def _enqueue(jobs: JobQueue, pipe: Pipeline, function: str, args: tuple[Any, ...], job_id: str) -> None:
    jobs.enqueue(
        pipe,
        function,
        args=args,
        timeout=TIMEOUT_S,
        result_ttl=RESULT_TTL_S,
        failure_ttl=FAILURE_TTL_S,
        description=f"end of run {job_id.partition('-')[0]}",
        job_id=job_id,
        retry=retries(RETRIES),
    )
