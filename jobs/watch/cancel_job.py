"""Cancels one job, without looking at what it holds: one that waits is taken from its queue, one that runs is
told to stop."""

from __future__ import annotations

import enum
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs.common import stored
from jobs.common.rq_jobs import JobStatus, executions_key, job_key, queue_keys, rate_limited_key
from jobs.runs.control import stop_held
from jobs.runs.redis_state.lock import transact

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

#: Where a job may be that a person may cancel, by what its hash says.
CANCELLABLE = (
    *(JobStatus.QUEUED, JobStatus.DEFERRED, JobStatus.SCHEDULED, JobStatus.STARTED),
    *(JobStatus.READY_TO_ENQUEUE, JobStatus.RATE_LIMITED),
)

#: A job that a worker takes just then is looked for there once more.
TRIES = 2


class JobCancel(enum.Enum):
    """What came of it."""

    REMOVED = "removed"  # it waited, and will not run
    STOPPING = "stopping"  # the worker that has it was told to stop it
    GONE = "gone"  # it neither waits nor runs


def cancel_job(connection: Redis, job_id: str) -> JobCancel:
    """Take a job from where it waits, as RQ's Job.cancel does, or tell the worker that holds it to stop it.

    Jobs that depend on it go on waiting. One whose worker has died counts as gone until it is queued again.
    Raises redis.exceptions.RedisError.
    """
    for _ in range(TRIES):
        if transact(connection, partial(stop_held, connection, [job_id])):
            return JobCancel.STOPPING
        # Whoever claims it meanwhile opens an execution, or writes its hash: then all is looked at again.
        taken = transact(connection, partial(_take, job_id), job_key(job_id), executions_key(job_id))
        if taken is not None:
            return JobCancel.REMOVED if taken else JobCancel.GONE
    return JobCancel.GONE


def _take(job_id: str, pipe: Pipeline) -> bool | None:
    """Return whether the job waited; None where a worker has it."""
    if pipe.exists(executions_key(job_id)):
        return None
    raw: Any = pipe.hmget(job_key(job_id), "origin", "rate_limit_key")
    if not raw[0]:
        return False
    keys, limit = queue_keys(stored.text(raw[0])), stored.text(raw[1] or b"")
    registries = (keys.deferred, keys.ready, keys.scheduled, rate_limited_key(limit))
    on_queue: Any = pipe.lpos(keys.waiting, job_id)
    waits = [pipe.zscore(key, job_id) is not None for key in registries]
    if on_queue is None and not any(waits):
        return False
    pipe.multi()
    pipe.lrem(keys.waiting, 0, job_id)
    for key in registries:
        pipe.zrem(key, job_id)
    pipe.hset(job_key(job_id), "status", JobStatus.CANCELED.value)
    pipe.zadd(keys.cancelled, {job_id: time.time()})
    pipe.execute()
    return True
