"""Tells of a run's end: an HTTP call, or a function of the user's, as jobs on the run's queue.

Each submission that asks for it is told of once its run has finished, was stopped, cancelled, or has failed.
The jobs are enqueued before the shard's job ends that ended the run, in one transaction with a mark: after a
worker that was killed in between the shard runs again, which enqueues them.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import run_key
from jobs.common.rq_jobs import JobQueue, Retry
from jobs.context import JobContext, Lease
from jobs.context.webhooks import call_webhook, check_host
from jobs.errors import RunBusy, UnknownRun, WebhookFailed, WebhookRefused, unlike
from jobs.runs.plans.names import run_and_shard
from jobs.runs.redis_state.state import PartCount, RunState, transact
from jobs.runs.redis_state.submission import ASKED_FOR, TOLD, TOLD_FAILED, ErrorLimit

POSTING = "jobs.post_run_end"

#: As RQ's default for jobs, then days to look at what became of them.
TIMEOUT_S, RESULT_TTL_S, FAILURE_TTL_S = 180, 24 * 3600, 7 * 24 * 3600

#: Tries of a job that failed, each at the end of its queue.
RETRIES = 3


def tell_failed(connection: Redis, job_id: str, lease: Lease, error: str) -> None:
    """Enqueue what is asked for where a run ends with this job, which is about to fail for good.

    To be called before the job's end is written. lease: of the execution that writes it. error: in one line.
    """
    found = run_and_shard(job_id)
    if found is None:
        return
    run, shard = found
    with suppress(RunBusy, UnknownRun):
        state = RunState(connection, run, lease)
        facts = state.facts()
        if shard is None:
            if facts.get("plan_job") == job_id:
                state.refuse_plan(error)
                tell_of(state, state.submission(), "failed", f"its planning failed: {error}")
        elif facts.keys() & set(ASKED_FOR):
            count = state.record_failed(shard)
            if not count.is_whole:
                tell_shards_failed(state, count, f", the last one: {error}")
            elif not state.is_finished():
                reason = f"all {count.total} parts are there, and the run's end is not: {error}"
                tell_of(state, state.submission(), "failed", reason)


def tell_shards_failed(state: RunState, count: PartCount, more: str = "") -> None:
    """Enqueue what is asked for where nothing of the run is left to run, and shards of it have failed."""
    if count.has_failed:
        tell_of(state, state.submission(), "failed", f"{count.failed} of {count.total} shards failed{more}")


def tell_of(state: RunState, submission: int, word: str, reason: str | None = None) -> None:
    """Enqueue what a submission asks for, unless it was told of. word: how it ended."""
    key = run_key(state.run)
    names = (*ASKED_FOR, "max_errors", "output", "rows", "shards", "total_rows", "total_errors")
    found: Any = state.connection.hmget(key, *names)
    *asked_for, limit, output, rows, shards, total_rows, total_errors = (each and stored.text(each) for each in found)
    if not any(asked_for):
        return
    is_end = word != "failed"
    rows_done, errors = int(total_rows or 0), int(total_errors or 0)
    if word == "finished":
        told = ErrorLimit.parse(limit).told(rows_done, errors, is_whole=True)
        if told is not None and errors == rows_done:
            word, reason = "failed", told
    content = {
        "run": state.run,
        "state": word,
        "output": output,
        "rows": rows and int(rows),
        "rows_done": rows_done,
        "errors": errors,
        "shards": shards and int(shards),
        "reason": reason,
    }
    transact(state.connection, lambda pipe: _tell(pipe, state, submission, content, is_end), key)


def _tell(pipe: Pipeline, state: RunState, submission: int, content: Mapping[str, Any], is_end: bool) -> None:
    """Enqueue it in one transaction. is_end: nothing goes on, whatever is enqueued again by hand."""
    key = run_key(state.run)
    fields = (*ASKED_FOR, TOLD, TOLD_FAILED, "cancelled", "submission", "queue")
    found: Any = pipe.hmget(key, *fields)
    webhook, on_end, told, told_failed, cancelled, last, queue = (
        None if each is None else stored.text(each) for each in found
    )
    if queue is None or str(submission) != last or told == last:
        return
    if not is_end and (told_failed == last or cancelled is not None):
        return
    pipe.multi()
    jobs = JobQueue(state.connection, queue)
    name = f"{state.run}-failed" if not is_end else state.run
    asked = {"webhook": webhook and (POSTING, webhook, dict(content)), "end": on_end and (on_end, dict(content))}
    for kind, call in asked.items():
        if not call:
            continue
        jobs.enqueue(
            pipe,
            call[0],
            args=call[1:],
            timeout=TIMEOUT_S,
            result_ttl=RESULT_TTL_S,
            failure_ttl=FAILURE_TTL_S,
            description=f"end of run {state.run}",
            job_id=f"{name}-{kind}-{submission}",
            retry=Retry(max=RETRIES),
        )
    pipe.hset(key, TOLD if is_end else TOLD_FAILED, str(submission))


PAUSES_S = (1.0, 2.0, 4.0, 8.0)

MAX_BODY_BYTES = 64 << 10

#: Answers after which another call may go better.
_PASSING = frozenset({408, 425, 429})

_HEADERS = {"Content-Type": "application/json", "User-Agent": "tokenmill"}


def post_run_end(context: JobContext, webhook: str, content: dict[str, Any]) -> dict[str, Any]:
    """POST what is told of a run's end to a URL whose host this worker may call; return the answer's status.

    Tried again where nobody answers, or with 408, 425, 429 or 5xx. Raises WebhookFailed, InvalidJob or WebhookRefused.
    """
    check_host(webhook, context.webhook_hosts)
    body = json.dumps(content).encode() if isinstance(content, dict) else b""
    if not 0 < len(body) <= MAX_BODY_BYTES:
        raise unlike("content", content, "a small mapping")
    for pause_s in (*PAUSES_S, None):
        context.check_interrupted()
        try:
            status = call_webhook(webhook, context.webhook_hosts, headers=_HEADERS, body=body)
            if 200 <= status < 300:
                return {"status": status}
            problem = f"it answered {status}"
            if status < 500 and status not in _PASSING:
                raise WebhookRefused(problem)
        except (OSError, HTTPException) as error:
            problem = f"no answer ({type(error).__name__})"
        if pause_s is not None:
            time.sleep(pause_s)
    raise WebhookFailed(problem)
