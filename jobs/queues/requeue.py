"""Puts failed jobs back into RQ's queues, without looking at what a job holds.

RQ's own command reads jobs with pickle unless it is called with `-S json`. A pickle may hold any code, which runs with
the rights of the process that reads it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import rq_jobs, stored
from jobs.common.keys import run_key
from jobs.common.rq_jobs import JobStatus
from jobs.errors import fault_of
from jobs.runs.plans.names import run_and_shard
from jobs.runs.redis_state.state import transact
from jobs.runs.watching.failures import error_line

#: The most jobs that are put back in one transaction.
CHUNK = 100
#: The most jobs that `requeue --all` puts back, by default.
REQUEUE_LIMIT = 10_000


@dataclass
class Requeued:
    """The result of putting failed jobs back.

    done: jobs that were put back.
    cancelled: jobs of runs that were cancelled or stopped. They stay failed, because they would only fail again.
    client_at_fault: jobs whose errors say that the client is at fault. `requeue_all` leaves them, because they would
    fail again.
    missing: jobs that are not among their queue's failed jobs, or whose payload is gone.
    """

    done: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    client_at_fault: list[str] = field(default_factory=list)

    def add(self, other: "Requeued") -> None:
        """Add the jobs of another result."""
        self.done += other.done
        self.cancelled += other.cancelled
        self.missing += other.missing
        self.client_at_fault += other.client_at_fault


#: Advice for a run whose jobs are not put back.
RESUBMIT = "`tokenmill submit` with the same arguments resumes a run that was cancelled or stopped"


def requeue(connection: Redis, queue: str, job_ids: Sequence[str]) -> Requeued:
    """Put failed jobs back at their queue's end, except jobs of cancelled runs. Each move is atomic."""
    result = Requeued()
    for start in range(0, len(job_ids), CHUNK):
        result.add(_requeue_chunk(connection, queue, job_ids[start : start + CHUNK]))
    return result


def requeue_all(connection: Redis, queue: str, limit: int, error: str = "") -> Requeued:
    """Requeue the oldest failed jobs, at most `limit`.

    Jobs of cancelled runs stay failed, and so do jobs whose client is at fault. The limit does not count these jobs. It
    counts the jobs that are put back, and the jobs that Redis has lost.

    error: requeue only jobs whose error has this text, even if their client is at fault. All other jobs stay failed.
    """
    result = Requeued()
    num_other_errors = 0
    while True:
        num_left = limit - len(result.done) - len(result.missing)
        if num_left <= 0:
            break
        # Jobs that were not put back stay the first among the failed jobs. The next page begins after them.
        first = (
            len(result.cancelled)
            + len(result.missing)
            + len(result.client_at_fault)
            + num_other_errors
        )
        last = first + min(num_left, CHUNK) - 1
        page: Any = connection.zrange(rq_jobs.QueueKeys(queue).failed, first, last)
        if not page:
            break
        job_ids = list(map(stored.text, page))
        last_errors = _last_errors(connection, job_ids)
        if error:
            to_requeue = [job_id for job_id in job_ids if error in error_line(last_errors[job_id])]
            num_other_errors += len(job_ids) - len(to_requeue)
        else:
            at_fault = [job_id for job_id in job_ids if fault_of(last_errors[job_id]) == "client"]
            result.client_at_fault += at_fault
            to_requeue = [job_id for job_id in job_ids if job_id not in at_fault]
        result.add(_requeue_chunk(connection, queue, to_requeue))
    return result


def _last_errors(connection: Redis, job_ids: Sequence[str]) -> dict[str, str]:
    """Return each job's last error, with its traceback; "" where none is known."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.xrevrange(rq_jobs.results_key(job_id), count=1)
        # Anybody may have written a value of another type to a job's results key. Then the job's error is unknown.
        replies: list[Any] = pipe.execute(raise_on_error=False)
    errors = dict.fromkeys(job_ids, "")
    for job_id, entries in zip(job_ids, replies, strict=True):
        if not isinstance(entries, list) or not entries:
            continue
        _entry_id, fields = entries[0]
        errors[job_id] = rq_jobs.error_text(fields)
    return errors


def _requeue_chunk(connection: Redis, queue: str, job_ids: Sequence[str]) -> Requeued:
    """Put some jobs back in one transaction, except jobs of cancelled runs."""
    jobs_of_cancelled_runs = _jobs_of_cancelled_runs(connection, job_ids)
    cancelled = [job_id for job_id in job_ids if job_id in jobs_of_cancelled_runs]
    to_requeue = [job_id for job_id in job_ids if job_id not in jobs_of_cancelled_runs]
    done: list[str] = []
    if to_requeue:
        move = partial(_requeue, connection, queue, to_requeue)
        watched_keys = map(rq_jobs.job_key, to_requeue)
        done = transact(connection, move, *watched_keys)
    missing = [job_id for job_id in to_requeue if job_id not in done]
    return Requeued(done=done, cancelled=cancelled, missing=missing)


def _jobs_of_cancelled_runs(connection: Redis, job_ids: Sequence[str]) -> set[str]:
    """Return the jobs whose run is cancelled or stopped."""
    run_of_job: dict[str, str] = {}
    for job_id in job_ids:
        run_shard = run_and_shard(job_id)
        if run_shard is not None:
            run, _shard = run_shard
            run_of_job[job_id] = run
    with connection.pipeline(transaction=False) as pipe:
        for run in run_of_job.values():
            pipe.hexists(run_key(run), "cancelled")
        replies = pipe.execute()

    cancelled = set()
    for job_id, is_run_cancelled in zip(run_of_job, replies, strict=True):
        if is_run_cancelled:
            cancelled.add(job_id)
    return cancelled


def _requeue(connection: Redis, queue: str, job_ids: Sequence[str], pipe: Pipeline) -> list[str]:
    """Requeue those jobs that are failed and have a payload. Return their ids. pipe: watches the jobs' hashes."""
    keys = rq_jobs.QueueKeys(queue)
    with connection.pipeline(transaction=False) as reads:
        reads.llen(keys.waiting)  # a key of another type raises here, and not amid the transaction
        for job_id in job_ids:
            reads.zscore(keys.failed, job_id)
            reads.hexists(rq_jobs.job_key(job_id), "data")
            reads.hmget(rq_jobs.job_key(job_id), "ttl", "rate_limit_key", "rate_limit_concurrency")
        replies = iter(reads.execute())
    next(replies)  # the queue's length
    fields_of_failed: dict[str, Any] = {}
    for job_id in job_ids:
        score = next(replies)
        has_payload = next(replies)
        fields = next(replies)
        if score is not None and has_payload:
            fields_of_failed[job_id] = fields
    if not fields_of_failed:
        return []
    pipe.multi()
    for job_id, (ttl_s, rate_limit, concurrency) in fields_of_failed.items():
        _queue_again(pipe, queue, job_id, ttl_s, stored.text(rate_limit or b""), concurrency)
    pipe.sadd(rq_jobs.QUEUES_KEY, keys.waiting)
    return list(fields_of_failed)


def _queue_again(
    pipe: Pipeline,
    queue: str,
    job_id: str,
    ttl_s: bytes | None,
    rate_limit: str,
    concurrency: bytes | None,
) -> None:
    """Write what RQ writes when it requeues a job. A job with a rate limit waits until the limit allows it.

    ttl_s: how long the job's hash is kept; None to keep it for ever. rate_limit: the key of the job's rate limit; ""
    for none. concurrency: how many jobs of this rate limit may run at once.
    """
    key = rq_jobs.job_key(job_id)
    pipe.zrem(rq_jobs.QueueKeys(queue).failed, job_id)
    pipe.hset(key, mapping={"origin": queue, "started_at": "", "ended_at": ""})
    if rate_limit and concurrency:
        pipe.hset(key, "status", JobStatus.RATE_LIMITED.value)
        pipe.sadd(rq_jobs.RATE_LIMITS_KEY, rate_limit)
        pipe.hset(rq_jobs.rate_limit_key(rate_limit), "concurrency", concurrency)
        pipe.zadd(rq_jobs.rate_limited_key(rate_limit), {job_id: time.time()})
    else:
        pipe.hset(
            key, mapping={"status": JobStatus.QUEUED.value, "enqueued_at": rq_jobs.time_text()}
        )
        pipe.rpush(rq_jobs.QueueKeys(queue).waiting, job_id)
    pipe.hdel(key, "exc_info")
    if ttl_s:
        pipe.expire(key, int(ttl_s))
    else:
        pipe.persist(key)  # removes the time to live that the job had while it was failed
