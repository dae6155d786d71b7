"""Tells of a run's end: an HTTP call, or a function of the user's, as jobs on the run's queue.

Each submission that asks for it is told of once its run has finished, was stopped, cancelled, or has failed.
The jobs are enqueued before the shard's job ends that ended the run, in one transaction with a mark: after a
worker that was killed in between the shard runs again, which enqueues them.
"""

import json
import time
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
from jobs.errors import RunBusy, UnknownRun, WebhookFailed, WebhookRefused, unlike
from jobs.runs.plans.names import run_and_shard
from jobs.runs.redis_state.state import PLAN_ERROR, PartCount, RunState, transact
from jobs.runs.redis_state.submission import ASKED_FOR, ON_END, TOLD, TOLD_FAILED, WEBHOOK, ErrorLimit

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
                state.describe({PLAN_ERROR: error})
                tell_of(state, state.submission(), "failed", f"its planning failed: {error}")
        elif facts.keys() & set(ASKED_FOR):
            count = state.record_failed(shard)
            if not count.is_whole:
                tell_shards_failed(state, count, f", the last one: {error}")
            elif "finished" not in state.facts():
                reason = f"all {count.total} parts are there, and the run's end is not: {error}"
                tell_of(state, state.submission(), "failed", reason)


def tell_shards_failed(state: RunState, count: PartCount, more: str = "") -> None:
    """Enqueue what is asked for where nothing of the run is left to run, and shards of it have failed."""
    if count.total is not None and count.failed > 0 and count.done + count.failed >= count.total:
        tell_of(state, state.submission(), "failed", f"{count.failed} of {count.total} shards failed{more}")


def tell_of(state: RunState, submission: int, word: str, reason: str | None = None) -> None:
    """Enqueue what a submission asks for, unless it was told of, in one transaction. word: how it ended."""
    transact(state.connection, partial(_tell, state, submission, word, reason), run_key(state.run))


def stop_over_limit(state: RunState, *, is_whole: bool) -> int | None:
    """Stop a run if too many rows fail, and enqueue its notices. Return its submission, or None if the run goes on.

    All is one transaction: a shard that ends meanwhile is judged too, and nobody ends a run that is stopped. is_whole:
    see RunState.judge.
    """
    return transact(state.connection, partial(_stop, state, is_whole), run_key(state.run))


def _stop(state: RunState, is_whole: bool, pipe: Pipeline) -> int | None:
    verdict = state.judge(is_whole=is_whole, client=pipe)
    if verdict is None:
        return None
    reason, submission = verdict
    _tell(state, submission, "stopped", reason, pipe)
    if not pipe.explicit_transaction:  # there is no notice to write
        pipe.multi()
    state.mark_cancelled(pipe, submission, stopped=reason)
    return submission


def _tell(state: RunState, submission: int, word: str, reason: str | None, pipe: Pipeline) -> None:
    found: Any = pipe.hgetall(run_key(state.run))
    known = {stored.text(name): stored.text(value) for name, value in found.items()}
    last, is_end = known.get("submission"), word != "failed"  # else it goes on where something is enqueued by hand
    if "queue" not in known or str(submission) != last or known.get(TOLD) == last:
        return
    if not known.keys() & set(ASKED_FOR) or (not is_end and (known.get(TOLD_FAILED) == last or "cancelled" in known)):
        return
    rows_done, errors = (stored.count(known.get(name)) or 0 for name in ("total_rows", "total_errors"))
    if word == "finished" and 0 < rows_done == errors:
        reason = ErrorLimit.stored(known.get("max_errors")).told(rows_done, errors, is_whole=True)
        word = "finished" if reason is None else "failed"
    content = {
        "run": state.run,
        "state": word,
        "output": known.get("output"),
        "rows": stored.count(known.get("rows")),
        "rows_done": rows_done,
        "errors": errors,
        "shards": stored.count(known.get("shards")),
        "reason": reason,
    }
    calls: dict[str, tuple[Any, ...]] = {}
    if WEBHOOK in known:
        calls["webhook"] = POSTING, known[WEBHOOK], content
    if ON_END in known:
        calls["end"] = known[ON_END], content
    pipe.multi()
    for kind, (function, *arguments) in calls.items():
        job_queue(state.connection, known["queue"]).enqueue_call(
            function,
            pipeline=pipe,
            args=arguments,
            timeout=TIMEOUT_S,
            result_ttl=RESULT_TTL_S,
            failure_ttl=FAILURE_TTL_S,
            description=f"end of run {state.run}",
            job_id=f"{state.run}{'' if is_end else '-failed'}-{kind}-{submission}",
            retry=Retry(max=RETRIES),
        )
    pipe.hset(run_key(state.run), TOLD if is_end else TOLD_FAILED, last)


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
