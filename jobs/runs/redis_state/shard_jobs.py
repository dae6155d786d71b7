"""Reads and enqueues a run's jobs. Each is enqueued once, however often the run is planned.

RQ's executions tell who holds a job. The status does not: a job that waits inside a worker still says "queued".
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, cast

from redis import Redis
from redis.client import Pipeline

from jobs.common import rq_jobs, stored
from jobs.common.keys import (
    FILE,
    FORMAT,
    FORMAT_FIELD,
    KIND_FIELD,
    MODEL_FIELD,
    SEQUENCES_FIELD,
    SUBMISSION_FIELD,
)
from jobs.common.rq_jobs import JobStatus, job_key, job_queue, prepared_job, results_key
from jobs.context import JobContext
from jobs.errors import RunCancelled
from jobs.runs.plans.names import PLAN, job_shard, shard_job_id
from jobs.runs.plans.plan import Plan
from jobs.runs.redis_state.state import RunState


@dataclass(frozen=True)
class EarlierJob:
    """A job as its hash describes it.

    status: None if it is unknown. submission: the number of the run's submission that enqueued the job.
    """

    id: str
    status: JobStatus | None
    origin: str
    executions: tuple[str, ...]
    submission: int = 0
    in_queue: bool = False

    def delete(self, pipe: Pipeline, from_queue: bool = True) -> None:
        """Delete the job as RQ's `Job.delete` does. from_queue: also take it off its queue."""
        keys = rq_jobs.QueueKeys(self.origin)
        if from_queue:
            pipe.lrem(keys.waiting, 1, self.id)
        for key in (
            keys.finished,
            keys.failed,
            keys.deferred,
            keys.ready,
            keys.scheduled,
            keys.cancelled,
        ):
            pipe.zrem(key, self.id)
        for execution in self.executions:
            pipe.zrem(keys.started, f"{self.id}:{execution}")
            pipe.delete(rq_jobs.execution_key(self.id, execution))
        pipe.delete(
            rq_jobs.executions_key(self.id),
            rq_jobs.job_key(self.id),
            *rq_jobs.relatives_keys(self.id),
        )


def read_earlier(
    connection: Redis, job_ids: Sequence[str], queue: rq_jobs.QueueKeys | None = None
) -> list[EarlierJob]:
    """Return those jobs that Redis has, all at one moment. queue: a queue on which they are looked for too."""
    keys = () if queue is None else (queue.waiting, queue.popped)
    with connection.pipeline() as pipe:
        for key in keys:
            pipe.lrange(key, 0, -1)
        for job_id in job_ids:
            pipe.exists(rq_jobs.job_key(job_id))
            pipe.hmget(rq_jobs.job_key(job_id), "status", "origin", SUBMISSION_FIELD)
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        replies = iter(pipe.execute())

    in_queue: set[str] = set()
    for _ in keys:
        in_queue.update(map(stored.text, next(replies)))

    jobs = []
    for job_id in job_ids:
        is_there = next(replies)
        status, origin, submission = next(replies)
        executions = next(replies)
        if not is_there:
            continue
        job = EarlierJob(
            id=job_id,
            status=rq_jobs.job_status(status),
            origin=stored.text(origin or b""),
            executions=tuple(map(stored.text, executions)),
            submission=stored.count(stored.text(submission or b"")) or 0,
            in_queue=job_id in in_queue,
        )
        jobs.append(job)
    return jobs


_CHUNK = 1000


def read_holders(connection: Redis, job_ids: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the executions that hold any of the jobs, each as job id, execution id and worker name."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        executions_by_job = zip(job_ids, pipe.execute(), strict=True)
        held_ids = [
            (job_id, stored.text(entry))
            for job_id, entries in executions_by_job
            for entry in entries
        ]

        for job_id, execution in held_ids:
            pipe.hget(rq_jobs.execution_key(job_id, execution), "worker_name")
        worker_names = pipe.execute()

    holders = []
    for (job_id, execution), name in zip(held_ids, worker_names, strict=True):
        if name:
            holders.append((job_id, execution, stored.text(name)))
    return holders


def num_held(connection: Redis, job_ids: Iterable[str]) -> int:
    """Return how many of the jobs a worker holds."""
    remaining = iter(job_ids)
    count = 0
    while chunk := [rq_jobs.executions_key(job_id) for job_id in islice(remaining, _CHUNK)]:
        count += int(connection.exists(*chunk))
    return count


#: How long RQ keeps the jobs' results. They only help while someone looks: a run's own record is its parts.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600
#: Jobs enqueued in one transaction. Small, so that other clients of Redis never wait long and memory stays flat.
CHUNK = 100
#: Entries of a queue that are read at once. They keep Redis busy for about a millisecond.
PAGE = 5000

_ALIVE = {
    JobStatus.QUEUED,
    JobStatus.STARTED,
    JobStatus.SCHEDULED,
    JobStatus.DEFERRED,
    JobStatus.CREATED,
}


def enqueue_shards(
    context: JobContext,
    queue_name: str,
    plan: Plan,
    state: RunState,
    shards: Sequence[int],
    low: int | None = None,
) -> int:
    """Enqueue shards that no live job works on; return how many. Raises RunBusy, RunCancelled.

    low: how many rows of each shard a cascade's second model is asked; None for jobs of the first model.
    """
    for_second = low is not None
    # A shard is at work if the second model's job is alive. So the first model looks at both queues.
    phases = plan.queues(queue_name)
    if for_second:
        phases = phases[1:]
    queues = [
        _ShardQueue(context.connection, name, plan.run, is_second) for name, is_second in phases
    ]
    fields: dict[Any, Any] = {
        MODEL_FIELD: plan.model_of(is_second=for_second).pin,
        KIND_FIELD: FILE,
        FORMAT_FIELD: FORMAT,
    }
    # The first model's job of a cascade leaves no result: it is gone once the second one's is there.
    result_ttl_s = 0 if plan.second and not for_second else RESULT_TTL_S
    enqueued = 0

    def prepare(shard: int, job_id: str) -> Any:
        return prepared_job(
            "jobs.score_shard",
            args=(
                plan.run,
                os.path.join(plan.spec.output, PLAN),
                shard,
                *([queue_name] if for_second else []),
            ),
            timeout=-1,
            result_ttl=result_ttl_s,
            failure_ttl=FAILURE_TTL_S,
            description=f"shard {shard} of run {plan.run}{', again' if for_second else ''}",
            job_id=job_id,
            meta=dict(context.trace) or None,
        )

    def enqueue(chunk: Sequence[int], pipe: Pipeline) -> int:
        if state.is_cancelled():
            raise RunCancelled(plan.run)
        submission = state.submission()
        cancelled = state.submission("cancelled_submission")
        earlier = [job_look for queue in queues for job_look in queue.look(chunk, cancelled)]
        alive = {job_shard(plan.run, job.id) for job, is_alive in earlier if is_alive}
        new_jobs = {
            shard: shard_job_id(plan.run, shard, for_second)
            for shard in chunk
            if shard not in alive
        }

        pipe.multi()
        state.take_turn(pipe)
        for job, is_alive in earlier:
            if not is_alive:
                job.delete(pipe, from_queue=job.origin != queues[0].queue.name)
                pipe.delete(results_key(job.id))
            elif 0 < cancelled >= job.submission:  # from now on it belongs to the newest submission
                pipe.hset(job_key(job.id), SUBMISSION_FIELD, str(submission))
        if new_jobs:  # a job may have been stopped, and so have failed, while this was prepared
            pipe.zrem(queues[0].keys.failed, *new_jobs.values())
        queues[0].queue.enqueue_many(
            [prepare(shard, job_id) for shard, job_id in new_jobs.items()], pipeline=pipe
        )
        for shard, job_id in new_jobs.items():
            num_sequences = plan.shards[shard].rows * plan.spec.n if low is None else low
            shard_fields: dict[Any, Any] = {
                SEQUENCES_FIELD: num_sequences,
                SUBMISSION_FIELD: submission,
            }
            pipe.hset(job_key(job_id), mapping={**fields, **shard_fields})
        return len(new_jobs)

    for start in range(0, len(shards), CHUNK):
        context.check_interrupted()
        # A chunk is written while no other planner writes, or not at all.
        enqueued += state.write(partial(enqueue, shards[start : start + CHUNK]))
    return enqueued


class _ShardQueue:
    """The jobs that a run has on one queue, for one model.

    The queue is read once. It is read again only for jobs that say "queued" and were not on it.
    """

    def __init__(self, connection: Redis, name: str, run: str, is_second: bool) -> None:
        self.queue = job_queue(connection, name)
        self.keys = rq_jobs.QueueKeys(name)
        self._connection = connection
        self._run = run
        self._is_second = is_second

    def look(self, shards: Sequence[int], cancelled: int) -> list[tuple[EarlierJob, bool]]:
        """Return the jobs that the shards have, each with whether it will bring its shard to an end.

        cancelled: the number of the last cancelled submission, 0 for none.
        """
        ids = [shard_job_id(self._run, shard, self._is_second) for shard in shards]
        jobs = read_earlier(self._connection, ids)
        queued = {job.id for job in jobs if job.status == JobStatus.QUEUED and not job.executions}
        if queued and not queued <= self._on_queue:
            jobs = read_earlier(self._connection, ids, self.keys)
        else:
            jobs = [replace(job, in_queue=job.id in queued) for job in jobs]
        return [(job, self._is_alive(job, cancelled)) for job in jobs]

    def _is_alive(self, job: EarlierJob, cancelled: int) -> bool:
        if (
            0 < cancelled >= job.submission
        ):  # a job held since before a cancel ends without its part
            return job.status == JobStatus.QUEUED and job.in_queue and not job.executions
        if job.executions:
            return True
        # A worker that was killed between taking a job and starting it may leave it "queued" on no queue.
        is_lost = (
            job.status == JobStatus.QUEUED and job.origin == self.queue.name and not job.in_queue
        )
        return job.status in _ALIVE and not is_lost

    @cached_property
    def _on_queue(self) -> set[str]:
        """Return the run's jobs that were on the queue, or just taken from it by a worker of RQ's own."""
        on_queue: set[str] = set()
        for key in (self.keys.waiting, self.keys.popped):
            start = 0
            while page := cast(
                "list[bytes]", self._connection.lrange(key, start, start + PAGE - 1)
            ):
                start += PAGE
                job_ids = map(stored.text, page)
                on_queue.update(
                    job_id for job_id in job_ids if job_shard(self._run, job_id) is not None
                )
        return on_queue
