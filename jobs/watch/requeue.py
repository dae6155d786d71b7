"""Puts failed jobs back on their queues, without looking at what a job holds.

RQ's own command reads jobs with pickle unless it is called with `-S json`, and a pickle that somebody wrote
runs as whoever reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import WatchError

from ..common.rq_jobs import JOB_PREFIX, QUEUES_KEY, JobStatus, queue_keys, time_text

if TYPE_CHECKING:
    from redis import Redis

#: Jobs that are requeued in one transaction.
CHUNK = 100

#: Failed jobs that are put back at most where all of a queue are asked for, unless told otherwise.
REQUEUE_LIMIT = 10_000


@dataclass(frozen=True)
class Requeued:
    """ids of the jobs that were put back on their queues, and of those that were not: gone, or not failed."""

    done: tuple[bytes, ...]
    left: tuple[bytes, ...]


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
