"""Puts failed jobs back on their queues, and cancels single jobs, without looking at what a job holds.

RQ's own command reads jobs with pickle unless it is called with `-S json`, and a pickle that somebody wrote
runs as whoever reads it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import WatchError

from jobs.common import stored
from jobs.common.rq_jobs import (
    JOB_PREFIX,
    QUEUES_KEY,
    RATE_LIMITS_KEY,
    JobStatus,
    executions_key,
    job_key,
    queue_keys,
    rate_limit_key,
    rate_limited_key,
    time_text,
)
from jobs.common.stored import text
from jobs.runs.control import stop_held
from jobs.runs.redis_state.lock import transact

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline


#: Jobs that are requeued in one transaction.
CHUNK = 100

#: Failed jobs that are put back at most where all of a queue are asked for, unless told otherwise.
REQUEUE_LIMIT = 10_000


@dataclass(frozen=True)
class Requeued:
    """ids of the jobs that were put back on their queues, and of those that were not: gone, or not failed."""

    done: tuple[bytes, ...]
    left: tuple[bytes, ...]


@dataclass(frozen=True)
class _Failed:
    """The key of its hash, and what that says of waiting. limit: of a rate, "" for none."""

    key: bytes
    ttl_s: int | None
    limit: str
    concurrency: bytes | None


def requeue(connection: Redis, queue: str, job_ids: Sequence[bytes]) -> Requeued:
    """Put failed jobs of a queue back at its end, in the order given; whoever runs them counts deaths anew.

    Each is moved at once or not at all, so that it is neither lost nor queued twice.
    """
    done: list[bytes] = []
    for start in range(0, len(job_ids), CHUNK):
        done += _requeue_chunk(connection, queue, job_ids[start : start + CHUNK])
    moved = set(done)
    return Requeued(tuple(done), tuple(job_id for job_id in job_ids if job_id not in moved))


def requeue_all(connection: Redis, queue: str, limit: int) -> Iterator[Requeued]:
    """Requeue the failed jobs that were there at the start, `limit` at most; yield after each chunk."""
    key = failed_key(queue)
    remaining = min(limit, int(connection.zcard(key)))
    skipped = 0
    while remaining > 0:
        found: Any = connection.zrange(key, skipped, skipped + min(CHUNK, remaining) - 1)
        if not found:
            return
        result = requeue(connection, queue, found)
        skipped += len(result.left)
        remaining -= len(found)
        yield result


def failed_key(queue: str) -> str:
    """Return the key of a queue's failed jobs."""
    return queue_keys(queue).failed


def _requeue_chunk(connection: Redis, queue: str, job_ids: Sequence[bytes]) -> list[bytes]:
    keys = {job_id: JOB_PREFIX.encode() + job_id for job_id in job_ids}
    pipe: Any
    while True:
        with connection.pipeline() as pipe:
            try:
                # A job that another requeues, deletes or ends meanwhile has its hash written.
                pipe.watch(*keys.values())
                failed = _failed_jobs(connection, queue, keys)
                if not failed:
                    return []
                pipe.multi()
                _queue_again(pipe, queue, failed)
                pipe.execute()
            except WatchError:
                continue
            return list(failed)


def _failed_jobs(connection: Redis, queue: str, keys: dict[bytes, bytes]) -> dict[bytes, _Failed]:
    """Return those of the jobs that are among the queue's failed ones and have a payload.

    Raises ResponseError where a key of the queue itself is of another type: half of a transaction would hold.
    """
    with connection.pipeline() as pipe:
        pipe.zcard(failed_key(queue))
        pipe.llen(queue_keys(queue).waiting)
        pipe.scard(QUEUES_KEY)
        pipe.execute()
    with connection.pipeline(transaction=False) as pipe:
        for job_id, key in keys.items():
            pipe.zscore(failed_key(queue), job_id)
            pipe.hexists(key, "data")
            pipe.hmget(key, "ttl", "rate_limit_key", "rate_limit_concurrency")
        replies = pipe.execute(raise_on_error=False)
    found: dict[bytes, _Failed] = {}
    for i, job_id in enumerate(keys):
        score, has_data, fields = replies[3 * i : 3 * i + 3]
        if score is not None and has_data is True:
            ttl, limit, concurrency = fields
            ttl_s = int(ttl) if ttl is not None and ttl.isdigit() else None
            found[job_id] = _Failed(keys[job_id], ttl_s, text(limit or b""), concurrency)
    return found


def _queue_again(pipe: Any, queue: str, failed: dict[bytes, _Failed]) -> None:
    """Write what RQ writes when it requeues these jobs. One with a rate limit is let in by a worker."""
    for job_id, job in failed.items():
        pipe.zrem(failed_key(queue), job_id)
        pipe.hset(job.key, mapping={"origin": queue, "started_at": "", "ended_at": ""})
        if job.limit and job.concurrency:
            pipe.hset(job.key, "status", JobStatus.RATE_LIMITED.value)
            pipe.sadd(RATE_LIMITS_KEY, job.limit)
            pipe.hset(rate_limit_key(job.limit), "concurrency", job.concurrency)
            pipe.zadd(rate_limited_key(job.limit), {job_id: time.time()})
        else:
            pipe.hset(job.key, mapping={"status": JobStatus.QUEUED.value, "enqueued_at": time_text()})
            pipe.rpush(queue_keys(queue).waiting, job_id)
        pipe.hdel(job.key, "exc_info")
        if job.ttl_s is None:
            pipe.persist(job.key)  # it was to go as a failed job
        else:
            pipe.expire(job.key, job.ttl_s)
    pipe.sadd(QUEUES_KEY, queue_keys(queue).waiting)


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
