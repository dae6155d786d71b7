"""What `tokenmill info` and `tokenmill requeue` do: they look at RQ's keys and never at what a job holds.

RQ's own commands of these names read jobs with pickle unless each call says `-S json`, and a pickle that
somebody wrote runs as whoever reads it. `rq info` also ends, as failed, what it takes for abandoned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError, WatchError

from ..common.keys import QUARANTINE
from ..common.rq_jobs import (
    JOB_PREFIX,
    QUEUE_PREFIX,
    QUEUES_KEY,
    WORKER_PREFIX,
    WORKERS_KEY,
    JobStatus,
    queue_keys,
    time_text,
)

if TYPE_CHECKING:
    from redis import Redis

#: Registries that `info` counts, by the name that it shows.
REGISTRIES = {
    "executing": "wip",
    "scheduled": "scheduled",
    "deferred": "deferred",
    "finished": "finished",
    "failed": "failed",
}

#: Jobs that are requeued in one transaction.
CHUNK = 100


@dataclass(frozen=True)
class QueueCounts:
    """A queue's name and how many jobs are where; None where the key is not what RQ keeps there."""

    name: bytes
    counts: dict[str, int | None]


@dataclass(frozen=True)
class WorkerSeen:
    """A worker's name and the fields of its hash, as they are in Redis."""

    name: bytes
    fields: dict[str, bytes]


@dataclass(frozen=True)
class Requeued:
    """ids of the jobs that were put back on their queues, and of those that were not: gone, or not failed."""

    done: tuple[bytes, ...]
    left: tuple[bytes, ...]


def queue_names(connection: Redis) -> list[bytes]:
    """Return the names of all queues that RQ knows."""
    prefix = QUEUE_PREFIX.encode()
    keys: Any = connection.smembers(QUEUES_KEY)
    return sorted(key.removeprefix(prefix) for key in keys)


def count_queues(connection: Redis, names: Sequence[bytes]) -> list[QueueCounts]:
    """Count the jobs of these queues, in one round trip and without RQ's cleanup. `waiting` comes first."""
    moment = time.time()
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(QUEUE_PREFIX.encode() + name)
            for shown, key in REGISTRIES.items():
                # Results that have expired stay in the registry until a worker cleans it.
                oldest = moment if shown == "finished" else "-inf"
                pipe.zcount(f"rq:{key}:".encode() + name, oldest, "+inf")
        replies = iter([None if isinstance(each, Exception) else each for each in pipe.execute(False)])
    return [QueueCounts(name, {shown: next(replies) for shown in ("waiting", *REGISTRIES)}) for name in names]


def num_set_aside(connection: Redis) -> int | None:
    """Count what workers have set aside in the quarantine; None where this user may not look there."""
    try:
        return int(connection.xlen(QUARANTINE))
    except ResponseError:
        return None


def list_workers(connection: Redis) -> list[WorkerSeen]:
    """Return the workers that live, by name. What cannot be read is left out."""
    members: Any = connection.smembers(WORKERS_KEY)
    keys = sorted(members)
    wanted = ("state", "queues", "current_job", "successful_job_count", "failed_job_count", "last_heartbeat")
    with connection.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hmget(key, wanted)
        replies = pipe.execute(raise_on_error=False)
    prefix = WORKER_PREFIX.encode()
    return [
        WorkerSeen(key.removeprefix(prefix), {k: v for k, v in zip(wanted, reply, strict=True) if v})
        for key, reply in zip(keys, replies, strict=True)
        if not isinstance(reply, Exception) and any(reply)
    ]


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
                ttls = _failed_jobs(connection, queue, keys)
                if not ttls:
                    return []
                pipe.multi()
                _queue_again(pipe, queue, {job_id: keys[job_id] for job_id in ttls}, ttls)
                pipe.execute()
            except WatchError:
                continue
            return list(ttls)


def _failed_jobs(connection: Redis, queue: str, keys: dict[bytes, bytes]) -> dict[bytes, int | None]:
    """Return those of the jobs that are among the queue's failed ones and have a payload, with their ttl.

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
            pipe.hget(key, "ttl")
        replies = pipe.execute(raise_on_error=False)
    found: dict[bytes, int | None] = {}
    for i, job_id in enumerate(keys):
        score, has_data, ttl = replies[3 * i : 3 * i + 3]
        if score is not None and has_data is True:
            found[job_id] = int(ttl) if ttl is not None and ttl.isdigit() else None
    return found


def _queue_again(pipe: Any, queue: str, keys: dict[bytes, bytes], ttls: dict[bytes, int | None]) -> None:
    """Write what RQ writes when it requeues these jobs."""
    fields = {
        "status": JobStatus.QUEUED.value,
        "origin": queue,
        "enqueued_at": time_text(),
        "started_at": "",
        "ended_at": "",
    }
    for job_id, key in keys.items():
        pipe.zrem(failed_key(queue), job_id)
        pipe.hset(key, mapping=fields)
        pipe.hdel(key, "worker_deaths", "exc_info")
        ttl = ttls[job_id]
        if ttl is None:
            pipe.persist(key)  # it was to go as a failed job
        else:
            pipe.expire(key, ttl)
    pipe.sadd(QUEUES_KEY, queue_keys(queue).waiting)
    pipe.rpush(queue_keys(queue).waiting, *keys)
