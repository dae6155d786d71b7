"""Finds out whose jobs wait in a queue, and takes all waiting jobs of one producer out of it.

A job's producer is its run, or the text that its `meta` has under `producer`. No payload is read.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import rq_jobs, stored
from jobs.common.display import safe_name
from jobs.common.rq_jobs import JobStatus
from jobs.runs.plans.names import run_and_shard
from jobs.runs.redis_state.state import transact

#: The most jobs whose producers are read. In a longer queue, these jobs are spread over its length.
MAX_READ = 10_000
_PAGE = 1000
#: The jobs that one transaction takes out.
_CHUNK = 100
#: A larger `meta` is not read.
_MAX_META_BYTES = 4096
#: Stands for the producer of a job that names none.
UNNAMED = "-"
#: The beginning of the name under which a run's jobs are counted.
RUN = "run "


@dataclass(frozen=True)
class Producers:
    """Whose jobs wait in a queue.

    num_waiting: the number of waiting jobs. num_read: the number of jobs whose producer was read. num_jobs: how many of
    these each producer has, the most first.
    """

    num_waiting: int
    num_read: int
    num_jobs: Mapping[str, int]

    def share(self, who: str) -> int:
        """Estimate how many of all waiting jobs belong to a producer."""
        return round(self.num_jobs[who] * self.num_waiting / max(1, self.num_read))


def read_producers(connection: Redis, queue: str) -> Producers:
    """Return whose jobs wait in a queue. At most MAX_READ jobs are read. Raises RedisError."""
    key = rq_jobs.QueueKeys(queue).waiting
    length: Any = connection.llen(key)
    num_pages = min(MAX_READ, length + _PAGE - 1) // _PAGE
    counts: Counter[str] = Counter()
    for page in range(num_pages):
        first = page * length // num_pages
        last = min((page + 1) * length // num_pages, first + _PAGE) - 1
        entries: Any = connection.lrange(key, first, last)
        counts.update(_producers(connection, list(map(stored.text, entries))))
    return Producers(length, counts.total(), dict(counts.most_common()))


def _producers(connection: Redis, job_ids: Sequence[str]) -> list[str]:
    """Return the producer of each job, safe to show."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hstrlen(rq_jobs.job_key(job_id), "meta")
        # A producer may have put another kind of value there. Then only that job has no name.
        sizes: list[Any] = pipe.execute(raise_on_error=False)
        is_read = [type(size) is int and 0 < size <= _MAX_META_BYTES for size in sizes]
        for job_id, reads in zip(job_ids, is_read, strict=True):
            if reads:
                pipe.hget(rq_jobs.job_key(job_id), "meta")
        metas = iter(pipe.execute(raise_on_error=False))

    producers = []
    for job_id, reads in zip(job_ids, is_read, strict=True):
        producer = stored.json_object(next(metas)).get("producer") if reads else None
        run_shard = run_and_shard(job_id)
        if run_shard is not None:
            run, _shard = run_shard
            producers.append(f"{RUN}{run}")
        elif isinstance(producer, str) and producer:
            producers.append(safe_name(producer))
        else:
            producers.append(UNNAMED)
    return producers


def cancel_waiting(connection: Redis, queue: str, who: str) -> int:
    """Cancel the waiting jobs of a producer, the last ones first; return how many. Raises RedisError.

    Jobs that a worker takes meanwhile go on. Jobs that depend on a cancelled job still wait, as with RQ.
    """
    key = rq_jobs.QueueKeys(queue).waiting
    length: Any = connection.llen(key)
    num_passed = 0
    num_cancelled = 0
    while num_passed + num_cancelled < length:
        entries: Any = connection.lrange(key, -num_passed - _CHUNK, -num_passed - 1)
        if not entries:
            break
        job_ids = list(map(stored.text, entries))
        producers = _producers(connection, job_ids)
        matching_ids = []
        for job_id, producer in zip(job_ids, producers, strict=True):
            if producer == who:
                matching_ids.append(job_id)
        num_taken = _cancel(connection, queue, matching_ids)
        num_cancelled += num_taken
        num_passed += len(job_ids) - num_taken
    return num_cancelled


def _cancel(connection: Redis, queue: str, job_ids: Sequence[str]) -> int:
    """Cancel those of these jobs that still wait, in one transaction; return how many."""
    if not job_ids:
        return 0
    watched = [*map(rq_jobs.job_key, job_ids), *map(rq_jobs.executions_key, job_ids)]
    return transact(connection, partial(_take, connection, queue, job_ids), *watched)


def _take(connection: Redis, queue: str, job_ids: Sequence[str], pipe: Pipeline) -> int:
    """Take jobs out of their queue, except jobs that a worker has taken. pipe: watches their keys."""
    with connection.pipeline(transaction=False) as reads:
        for job_id in job_ids:
            reads.exists(rq_jobs.executions_key(job_id))
        is_held: list[Any] = reads.execute()
    keys = rq_jobs.QueueKeys(queue)
    moment = time.time()
    pipe.multi()
    waiting = [job_id for job_id, held in zip(job_ids, is_held, strict=True) if not held]
    for job_id in waiting:
        pipe.lrem(keys.waiting, -1, job_id)  # from the end, where the job stands
        pipe.hset(rq_jobs.job_key(job_id), "status", JobStatus.CANCELED.value)
        pipe.zadd(keys.cancelled, {job_id: moment})
    return len(waiting)
