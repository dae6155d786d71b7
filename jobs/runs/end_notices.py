"""Sends notices of a run's end: an HTTP call or a user's function. Each notice is a job on the run's queue.

A submission that asks for notices gets them once: when its run has finished or failed, or was stopped or cancelled. One
transaction enqueues the notices and notes that they were enqueued. Only after that, the end of the last job is written.
If a worker is killed before the transaction, the shard runs again and enqueues the notices.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import run_key
from jobs.common.rq_jobs import Retry, job_queue
from jobs.context import JobContext, Lease
from jobs.context.webhooks import call_webhook, check_host
from jobs.errors import RunBusy, UnknownRun, WebhookFailed, WebhookRefused, wrong_value_error
from jobs.runs.plans.names import run_and_shard
from jobs.runs.redis_state.state import PLAN_ERROR, PartCount, RunState, transact
from jobs.runs.redis_state.submission import (
    END_NOTIFIED,
    FAILURE_NOTIFIED,
    NOTICES,
    ON_END,
    WEBHOOK,
    ErrorLimit,
)

POSTING = "jobs.post_run_end"
#: RQ's default for jobs.
TIMEOUT_S = 180
#: How long the result of a notice is kept for people.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600
#: How often a failed notice is tried again. For each retry, the notice goes to the end of its queue.
RETRIES = 3


def notify_failed(connection: Redis, lease: Lease, error: str) -> None:
    """Enqueue a run's notices if the failure of one of its jobs makes the run fail.

    Does nothing for a job that belongs to no run. Call this before the job's end is written.
    lease: the lease of the execution that fails for good. error: one line.
    """
    run_shard = run_and_shard(lease.job_id)
    if run_shard is None:
        return
    run, shard = run_shard
    with suppress(RunBusy, UnknownRun):  # this worker has lost the job, or Redis has lost the run
        state = RunState(connection, run, lease)
        facts = state.facts()
        if shard is not None:
            if _wants_notices(facts):
                _notify_shard_failed(state, shard, error)
        elif facts.get("plan_job") == lease.job_id:
            state.describe({PLAN_ERROR: error})
            enqueue_notices(state, state.submission(), "failed", f"its planning failed: {error}")


def _notify_shard_failed(state: RunState, shard: int, error: str) -> None:
    """Record that a shard has failed for good, and enqueue the run's notices if nothing of the run is left to do."""
    count = state.record_failed(shard)
    if not count.has_all_parts:  # some shards have no part
        notify_if_rest_failed(state, count, last_error=error)
    elif "finished" not in state.facts():
        reason = f"every part is written, but the run did not finish: {error}"
        enqueue_notices(state, state.submission(), "failed", reason)


def _wants_notices(facts: Mapping[str, str]) -> bool:
    """Whether a run's submission asks for any notice. facts: the run's hash."""
    return any(name in facts for name in NOTICES)


def notify_if_rest_failed(state: RunState, count: PartCount, last_error: str | None = None) -> None:
    """Enqueue a run's notices if shards have failed and every other shard is done.

    last_error: the error of the shard that failed last, if it is known.
    """
    if count.total is None or count.failed == 0:
        return
    if count.done + count.failed >= count.total:
        reason = f"{count.failed} of {count.total} shards failed"
        if last_error is not None:
            reason += f", the last one: {last_error}"
        enqueue_notices(state, state.submission(), "failed", reason)


def enqueue_notices(
    state: RunState, submission: int, outcome: str, reason: str | None = None
) -> None:
    """Enqueue a submission's notices in one transaction, unless they were enqueued before.

    outcome: how the run ended, such as "failed". reason: why, for people.
    """
    enqueue = partial(_enqueue_once, state, submission, outcome, reason)
    transact(state.connection, enqueue, run_key(state.run))


def stop_over_limit(state: RunState, *, has_all_parts: bool) -> int | None:
    """Stop a run if too many of its rows have an error, and enqueue its notices.

    Returns the number of the stopped submission; None if the run goes on.
    The check and the stop are one transaction. So a shard that ends meanwhile is judged too, and no worker finishes a
    stopped run.
    has_all_parts: see RunState.judge.
    """
    return transact(state.connection, partial(_stop, state, has_all_parts), run_key(state.run))


def _stop(state: RunState, has_all_parts: bool, pipe: Pipeline) -> int | None:
    """Do the work of `stop_over_limit`, in a transaction of `pipe`, which watches the run."""
    verdict = state.judge(has_all_parts=has_all_parts, client=pipe)
    if verdict is None:
        return None
    reason, submission = verdict
    _enqueue_once(state, submission, "stopped", reason, pipe)
    # `_enqueue_once` begins the transaction only if it has notices to enqueue.
    has_begun_transaction = pipe.explicit_transaction
    if not has_begun_transaction:
        pipe.multi()
    state.mark_cancelled(pipe, submission, stopped=reason)
    return submission


def _enqueue_once(
    state: RunState, submission: int, outcome: str, reason: str | None, pipe: Pipeline
) -> None:
    """Have `pipe` enqueue a submission's notices, unless they were enqueued before or a later submission came.

    Begins the transaction of `pipe` if there is something to enqueue.
    """
    fields: Any = pipe.hgetall(run_key(state.run))
    facts = {stored.text(name): stored.text(value) for name, value in fields.items()}
    # A failed run has not ended, because it goes on if a person enqueues its jobs again.
    is_end = outcome != "failed"
    if not _is_due(facts, submission, is_end=is_end):
        return

    content = _notice(state.run, facts, outcome, reason)
    notices: list[tuple[str, str, list[Any]]] = []  # kind, function and the function's arguments
    if WEBHOOK in facts:
        notices.append(("webhook", POSTING, [facts[WEBHOOK], content]))
    if ON_END in facts:
        notices.append(("end", facts[ON_END], [content]))

    id_prefix = state.run if is_end else f"{state.run}-failed"
    pipe.multi()
    for kind, function, arguments in notices:
        job_queue(state.connection, facts["queue"]).enqueue_call(
            function,
            pipeline=pipe,
            args=arguments,
            timeout=TIMEOUT_S,
            result_ttl=RESULT_TTL_S,
            failure_ttl=FAILURE_TTL_S,
            description=f"end of run {state.run}",
            job_id=f"{id_prefix}-{kind}-{submission}",
            retry=Retry(max=RETRIES),
        )
    field = END_NOTIFIED if is_end else FAILURE_NOTIFIED
    pipe.hset(run_key(state.run), field, str(submission))


def _is_due(facts: Mapping[str, str], submission: int, *, is_end: bool) -> bool:
    """Whether a submission's notices must be enqueued.

    facts: the run's hash. is_end: True for notices of the run's end; False for notices of its failure.
    """
    is_last = facts.get("submission") == str(submission)
    has_queue = "queue" in facts  # without a queue, no notice can be enqueued
    if not is_last or not has_queue or not _wants_notices(facts):
        return False
    if facts.get(END_NOTIFIED) == str(submission):
        return False
    if is_end:
        return True
    # Notices of a failure are sent once, and not for a cancelled run.
    return facts.get(FAILURE_NOTIFIED) != str(submission) and "cancelled" not in facts


def _notice(run: str, facts: Mapping[str, str], outcome: str, reason: str | None) -> dict[str, Any]:
    """Return the content of a notice. facts: the run's hash. outcome, reason: see `enqueue_notices`.

    A finished run counts as failed if every row has an error and the run's error limit forbids that. Otherwise, a
    finished run with expired rows counts as expired.
    """
    rows_done = stored.count(facts.get("total_rows")) or 0
    errors = stored.count(facts.get("total_errors")) or 0
    expired = stored.count(facts.get("total_expired")) or 0
    has_only_errors = rows_done > 0 and errors == rows_done
    if outcome == "finished" and has_only_errors:
        limit = ErrorLimit.from_stored(facts.get("max_errors"))
        # An expired row has an error too, but the model was never asked. So the limit does not count it.
        judged_rows = rows_done - expired
        judged_errors = errors - expired
        reason = limit.excess(judged_rows, judged_errors, has_ended=True)
        if reason is not None:
            outcome = "failed"
    if outcome == "finished" and expired:
        rows_were = "row was" if expired == 1 else "rows were"
        reason = f"{expired} {rows_were} not begun before the deadline"
        outcome = "expired"
    return {
        "run": run,
        "state": outcome,
        "output": facts.get("output"),
        "rows": stored.count(facts.get("rows")),
        "rows_done": rows_done,
        "errors": errors,
        "shards": stored.count(facts.get("shards")),
        "reason": reason,
    }


#: Pauses between the tries of a call.
PAUSES_S = (1.0, 2.0, 4.0, 8.0)
MAX_BODY_BYTES = 64 << 10
#: HTTP statuses below 500 after which another try may succeed.
_TEMPORARY = frozenset({408, 425, 429})

_HEADERS = {"Content-Type": "application/json", "User-Agent": "tokenmill"}


def post_run_end(context: JobContext, webhook: str, content: dict[str, Any]) -> dict[str, Any]:
    """POST a notice to a URL whose host this worker may call; return the status of the response.

    The call is tried again if nobody answers, or if the status is 408, 425, 429 or 5xx. Raises WebhookFailed if the
    last try fails too, and WebhookRefused for any other status outside 2xx. Raises InvalidJob for a host that this
    worker may not call, and for a content that is no small mapping.
    """
    check_host(webhook, context.webhook_hosts)
    body = json.dumps(content).encode() if isinstance(content, dict) else b""
    if not 0 < len(body) <= MAX_BODY_BYTES:
        raise wrong_value_error("content", content, "a small mapping")
    for pause_s in (*PAUSES_S, None):  # the pause after each try; there is none after the last try
        context.check_interrupted()
        try:
            status = call_webhook(webhook, context.webhook_hosts, headers=_HEADERS, body=body)
            if 200 <= status < 300:
                return {"status": status}
            problem = f"it answered {status}"
            if status < 500 and status not in _TEMPORARY:
                raise WebhookRefused(problem)
        except (OSError, HTTPException) as error:
            problem = f"no answer ({type(error).__name__})"
        if pause_s is not None:
            time.sleep(pause_s)
    raise WebhookFailed(problem)
