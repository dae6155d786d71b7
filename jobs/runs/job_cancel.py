"""Cancels single jobs, without reading their arguments."""

import enum
import time
from functools import partial
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import rq_jobs, stored
from jobs.common.rq_jobs import JobStatus
from jobs.runs.control import stop_held
from jobs.runs.redis_state.state import transact

#: A person may cancel a job that has one of these statuses in its hash.
CANCELLABLE = (
    JobStatus.QUEUED,
    JobStatus.DEFERRED,
    JobStatus.SCHEDULED,
    JobStatus.STARTED,
    JobStatus.READY_TO_ENQUEUE,
    JobStatus.RATE_LIMITED,
)


class JobCancel(enum.Enum):
    """What a cancel has done."""

    REMOVED = "removed"  # the job waited, and will not run
    STOPPING = "stopping"  # the job's worker was asked to stop it
    GONE = "gone"  # the job neither waits nor runs


def cancel_job(connection: Redis, job_id: str) -> JobCancel:
    """Take a waiting job off its queue or registry, or ask its worker to stop it. Raises RedisError.

    Jobs that depend on the cancelled job go on waiting.
    """
    for _ in range(2):
        num_held = transact(connection, partial(stop_held, connection, [job_id]))
        if num_held > 0:
            return JobCancel.STOPPING
        # `_cancel_waiting` is called again if one of these keys changes before it has cancelled the job. A worker that
        # claims the job changes one of them.
        outcome = transact(
            connection,
            partial(_cancel_waiting, job_id),
            rq_jobs.job_key(job_id),
            rq_jobs.executions_key(job_id),
        )
        if outcome is _Outcome.CANCELLED:
            return JobCancel.REMOVED
        if outcome is _Outcome.NOT_THERE:
            return JobCancel.GONE
        # A worker claimed the job after `stop_held` had read who holds it. The second round asks that worker to stop.
    return JobCancel.GONE


class _Outcome(enum.Enum):
    """What `_cancel_waiting` did."""

    CANCELLED = enum.auto()  # the job waited, and was cancelled
    HELD = enum.auto()  # nothing, because a worker holds the job
    NOT_THERE = enum.auto()  # nothing, because the job neither waits nor runs


def _cancel_waiting(job_id: str, pipe: Pipeline) -> _Outcome:
    """Cancel a job that waits. Change nothing if the job does not wait."""
    if pipe.exists(rq_jobs.executions_key(job_id)):
        return _Outcome.HELD
    fields: Any = pipe.hmget(rq_jobs.job_key(job_id), "origin", "rate_limit_key")
    queue_name, rate_limit = fields
    if not queue_name:
        return _Outcome.NOT_THERE

    keys = rq_jobs.QueueKeys(stored.text(queue_name))
    registries = [keys.deferred, keys.ready, keys.scheduled]
    # Some users of Redis may not read the keys of rate limits, so no such key is read without need.
    if rate_limit:
        registries.append(rq_jobs.rate_limited_key(stored.text(rate_limit)))
    position_in_queue: Any = pipe.lpos(keys.waiting, job_id)
    in_registries = [pipe.zscore(key, job_id) is not None for key in registries]
    if position_in_queue is None and not any(in_registries):
        return _Outcome.NOT_THERE

    pipe.multi()
    pipe.lrem(keys.waiting, 0, job_id)
    for key in registries:
        pipe.zrem(key, job_id)
    pipe.hset(rq_jobs.job_key(job_id), "status", JobStatus.CANCELED.value)
    pipe.zadd(keys.cancelled, {job_id: time.time()})
    return _Outcome.CANCELLED
