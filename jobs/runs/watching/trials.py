"""Jobs of one's own that are awaited: a look at a run's prompts, and answers of a few of them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from redis import Redis

from jobs.common import stored
from jobs.common.keys import MODEL_FIELD
from jobs.common.rq_jobs import JobQueue, JobStatus, job_key, job_status, last_result, results_key
from jobs.errors import TrialFailed
from jobs.runs.redis_state.run_jobs import read_earlier
from jobs.runs.watching.obstacles import listened_queues, no_worker_text
from jobs.runs.watching.snapshot import failure_text, read_workers

#: Between two looks, and before it is said that nobody listens.
POLL_S, PATIENCE_S = 0.05, 3.0

#: Tokenizing a large file takes a while; RQ's default is 3 minutes.
TIMEOUT_S = 3600
RESULT_TTL_S = 3600

#: Of a result, unpacked: a worker's is no larger unless its operator allows it.
MAX_RESULT_BYTES = 16 << 20

_OVER = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED, None}


@dataclass(frozen=True)
class Trial:
    """One job to be. kwargs: of the function."""

    function: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Tried:
    """What came of a job: its value, or its error. Times are Unix seconds, 0 where it did not run."""

    value: dict[str, Any] | None
    error: str | None
    began_at: float
    ended_at: float


def try_jobs(
    connection: Redis,
    queue: str,
    trials: Sequence[Trial],
    model: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Tried]:
    """Enqueue jobs at once, await them, and take them away again. Raises TrialFailed where nobody listens."""
    ids = [f"trial-{uuid4().hex}" for _ in trials]
    try:
        _enqueue(connection, queue, ids, trials, model)
        _await(connection, queue, ids, clock, sleep)
        return [_tried(connection, job_id) for job_id in ids]
    finally:
        _remove(connection, ids)


def try_job(connection: Redis, queue: str, trial: Trial, model: str | None = None) -> dict[str, Any]:
    """Return what one job gives. Raises TrialFailed."""
    (tried,) = try_jobs(connection, queue, [trial], model)
    if tried.value is None:
        raise TrialFailed(tried.error or "it left no result")
    return tried.value


def _enqueue(connection: Redis, queue: str, ids: Sequence[str], trials: Sequence[Trial], model: str | None) -> None:
    jobs = JobQueue(connection, queue)
    with connection.pipeline() as pipe:
        for job_id, trial in zip(ids, trials, strict=True):
            jobs.enqueue(
                pipe,
                trial.function,
                kwargs=dict(trial.kwargs),
                timeout=TIMEOUT_S,
                result_ttl=RESULT_TTL_S,
                failure_ttl=RESULT_TTL_S,
                description=trial.function,
                job_id=job_id,
            )
            if model is not None:
                pipe.hset(job_key(job_id), MODEL_FIELD, model)
        pipe.execute()


def _await(
    connection: Redis, queue: str, ids: Sequence[str], clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    heard_at = clock()
    while True:
        with connection.pipeline() as pipe:
            for job_id in ids:
                pipe.hget(job_key(job_id), "status")
            statuses = pipe.execute()
        if all(job_status(status) in _OVER for status in statuses):
            return
        if read_workers(connection, queue)[0]:
            heard_at = clock()
        elif clock() - heard_at > PATIENCE_S:
            raise TrialFailed(no_worker_text(queue, listened_queues(connection)))
        sleep(POLL_S)


def _tried(connection: Redis, job_id: str) -> Tried:
    fields: Any = connection.hmget(job_key(job_id), "status", "started_at", "ended_at")
    began_at, ended_at = (stored.moment(field) or 0.0 for field in fields[1:])
    if job_status(fields[0]) is not JobStatus.FINISHED:
        return Tried(None, failure_text(connection, job_id), began_at, ended_at)
    raw = last_result(connection, job_id)
    value = None
    with suppress(ValueError, RecursionError):
        value = json.loads(raw) if len(raw) <= MAX_RESULT_BYTES else None
    if not isinstance(value, dict):
        return Tried(None, "its result cannot be read", began_at, ended_at)
    return Tried(value, None, began_at, ended_at)


def _remove(connection: Redis, ids: Sequence[str]) -> None:
    left = read_earlier(connection, ids)
    with connection.pipeline() as pipe:
        for job in left:
            job.delete(pipe)
            pipe.delete(results_key(job.id))
        pipe.execute()
