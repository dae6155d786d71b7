"""Cancels single jobs, without looking at what a job holds."""

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
    """Take a waiting job from its place, or ask its worker to stop it. Its dependents still wait. Raises RedisError."""
    for _ in range(2):  # look again if a worker took the job between the two looks
        if transact(connection, partial(stop_held, connection, [job_id])):
            return JobCancel.STOPPING
        # If a worker claims the job meanwhile, one of these keys changes, and `_take` is called again.
        had_waited = transact(
            connection,
            partial(_take, job_id),
            rq_jobs.job_key(job_id),
            rq_jobs.executions_key(job_id),
        )
        if had_waited is not None:
            return JobCancel.REMOVED if had_waited else JobCancel.GONE
    return JobCancel.GONE


def _take(job_id: str, pipe: Pipeline) -> bool | None:
    """Cancel a job that waits. Return whether the job waited; None if a worker holds it."""
    if pipe.exists(rq_jobs.executions_key(job_id)):
        return None
    fields: Any = pipe.hmget(rq_jobs.job_key(job_id), "origin", "rate_limit_key")
    queue_name, rate_limit = fields
    if not queue_name:
        return False

    keys = rq_jobs.QueueKeys(stored.text(queue_name))
    registries = [keys.deferred, keys.ready, keys.scheduled]
    if rate_limit:  # not every user may read the keys of rate limits
        registries.append(rq_jobs.rate_limited_key(stored.text(rate_limit)))
    place_in_queue: Any = pipe.lpos(keys.waiting, job_id)
    in_registries = [pipe.zscore(key, job_id) is not None for key in registries]
    if place_in_queue is None and not any(in_registries):
        return False

    pipe.multi()
    pipe.lrem(keys.waiting, 0, job_id)
    for key in registries:
        pipe.zrem(key, job_id)
    pipe.hset(rq_jobs.job_key(job_id), "status", JobStatus.CANCELED.value)
    pipe.zadd(keys.cancelled, {job_id: time.time()})
    return True
