"""Changes queues without looking into jobs: empties a queue, moves a job to the front, deletes failed jobs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import rq_jobs, stored
from jobs.common.keys import prefixed
from jobs.runs.job_cancel import CANCELLABLE
from jobs.runs.redis_state.state import transact

#: The most jobs that are changed in one transaction.
CHUNK = 200


def move_to_front(connection: Redis, queue: str, job_id: str) -> bool:
    """Move a waiting job to the front of its queue. Returns whether the job waited."""
    queue_key = rq_jobs.QueueKeys(queue).waiting
    with connection.pipeline() as pipe:
        # If a worker has taken the job meanwhile, the second command removes the entry that the first one has added.
        pipe.lpush(queue_key, job_id)
        pipe.lrem(queue_key, -1, job_id)
        pipe.lpos(queue_key, job_id)
        _length, _num_removed, position = pipe.execute()
    return position is not None


def empty_queue(
    connection: Redis, queue: str, tell: Callable[[int], None] = lambda num_done: None
) -> int:
    """Take all waiting jobs out of a queue, and delete them. Return how many were taken.

    Jobs that run go on. Jobs that are enqueued meanwhile may be taken too. tell: called after each transaction with the
    number of jobs taken so far.
    """
    queue_key = rq_jobs.QueueKeys(queue).waiting
    num_left: Any = connection.llen(queue_key)
    num_taken = 0
    while num_left > 0:
        last = min(num_left, CHUNK) - 1  # LRANGE counts from 0, and includes the last entry
        entries: Any = connection.lrange(queue_key, 0, last)
        if not entries:
            break
        num_taken += _take(connection, queue_key, list(map(stored.text, entries)))
        num_left -= len(entries)
        tell(num_taken)
    return num_taken


def _take(connection: Redis, queue_key: str, job_ids: Sequence[str]) -> int:
    """Take jobs out of the queue, then delete the jobs that nobody has enqueued again. Return how many were taken."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(rq_jobs.job_key(job_id), "enqueued_at")
        enqueueing_times = pipe.execute(raise_on_error=False)
    with connection.pipeline() as pipe:
        for job_id in job_ids:
            pipe.lrem(queue_key, 1, job_id)
        removal_counts = pipe.execute()

    enqueued_at_of_taken: dict[str, Any] = {}
    for job_id, enqueued_at, num_removed in zip(
        job_ids, enqueueing_times, removal_counts, strict=True
    ):
        if num_removed > 0:
            enqueued_at_of_taken[job_id] = enqueued_at
    if enqueued_at_of_taken:
        job_keys = map(rq_jobs.job_key, enqueued_at_of_taken)
        executions_keys = map(rq_jobs.executions_key, enqueued_at_of_taken)
        delete = partial(_delete_taken, connection, enqueued_at_of_taken)
        transact(connection, delete, *job_keys, *executions_keys)
    return sum(removal_counts)


def _delete_taken(connection: Redis, enqueued_at_of_taken: dict[str, Any], pipe: Pipeline) -> None:
    """Delete jobs that were taken out of a queue, except jobs that were enqueued again or that a worker holds.

    enqueued_at_of_taken: the `enqueued_at` that each job's hash had before the job was taken out, by job id. pipe:
    watches the jobs' hashes and executions.
    """
    with connection.pipeline(transaction=False) as reads:
        for job_id in enqueued_at_of_taken:
            reads.hget(rq_jobs.job_key(job_id), "enqueued_at")
            reads.exists(rq_jobs.executions_key(job_id))
        replies = iter(reads.execute(raise_on_error=False))

    pipe.multi()
    for job_id, enqueued_at in enqueued_at_of_taken.items():
        enqueued_at_now = next(replies)
        is_held = next(replies)
        if enqueued_at_now == enqueued_at and not is_held:
            _delete(pipe, job_id)


def delete_failed(connection: Redis, queue: str, job_ids: Sequence[str]) -> list[str]:
    """Delete those of `job_ids` that are failed jobs of the queue, and return their ids.

    Jobs that depend on a deleted job still wait.
    """
    deleted = []
    for start in range(0, len(job_ids), CHUNK):
        chunk = job_ids[start : start + CHUNK]
        keys = map(rq_jobs.job_key, chunk)
        deleted += transact(connection, partial(_delete_failed, connection, queue, chunk), *keys)
    return deleted


def _delete_failed(
    connection: Redis, queue: str, job_ids: Sequence[str], pipe: Pipeline
) -> list[str]:
    """Delete those jobs that are failed, and return their ids. pipe: watches the jobs' hashes."""
    failed = rq_jobs.QueueKeys(queue).failed
    with connection.pipeline(transaction=False) as reads:
        for job_id in job_ids:
            reads.zscore(failed, job_id)
            reads.hmget(rq_jobs.job_key(job_id), "status", "group_id")
        replies = iter(reads.execute(raise_on_error=False))

    deleted = []
    pipe.multi()
    for job_id in job_ids:
        score = next(replies)
        fields = next(replies)
        if not isinstance(score, float):
            continue
        deleted.append(job_id)
        pipe.zrem(failed, job_id)
        status, group = fields if isinstance(fields, list) else (None, None)
        # A status in CANCELLABLE means that the job was enqueued again under its id. Then the job itself stays.
        if rq_jobs.job_status(status) not in CANCELLABLE:
            _delete(pipe, job_id)
        if group:
            pipe.srem(prefixed(f"rq:group:{stored.text(group)}"), job_id)
    return deleted


def _delete(pipe: Pipeline, job_id: str) -> None:
    """Delete a job: its hash, its results, and the lists of its dependents and dependencies."""
    pipe.delete(
        rq_jobs.job_key(job_id), rq_jobs.results_key(job_id), *rq_jobs.relatives_keys(job_id)
    )
