"""A run's jobs: looked at, found where workers hold them, and enqueued, each once however often a run is planned.

RQ's executions tell who holds a job: one that waits inside a worker still says "queued".
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
from jobs.common.keys import FILE, FORMAT, FORMAT_FIELD, KIND_FIELD, MODEL_FIELD, SEQUENCES_FIELD, SUBMISSION_FIELD
from jobs.common.rq_jobs import JobStatus, job_key, job_queue, prepared_job, results_key
from jobs.context import JobContext
from jobs.errors import RunCancelled
from jobs.runs.plans.names import PLAN, job_shard, shard_job_id
from jobs.runs.plans.plan import Plan
from jobs.runs.redis_state.state import RunState


@dataclass(frozen=True)
class EarlierJob:
    """A job as its hash tells of it. status: None for an unknown one. submission: of its run, that has enqueued it."""

    id: str
    status: JobStatus | None
    origin: str
    executions: tuple[str, ...]
    submission: int = 0
    in_queue: bool = False

    def delete(self, pipe: Pipeline, from_queue: bool = True) -> None:
        """Delete it as RQ's `Job.delete` does. from_queue: also take it off its queue."""
        keys = rq_jobs.QueueKeys(self.origin)
        if from_queue:
            pipe.lrem(keys.waiting, 1, self.id)
        for key in (keys.finished, keys.failed, keys.deferred, keys.ready, keys.scheduled, keys.cancelled):
            pipe.zrem(key, self.id)
        for execution in self.executions:
            pipe.zrem(keys.started, f"{self.id}:{execution}")
            pipe.delete(rq_jobs.execution_key(self.id, execution))
        pipe.delete(rq_jobs.executions_key(self.id), rq_jobs.job_key(self.id), *rq_jobs.relatives_keys(self.id))


def read_earlier(connection: Redis, job_ids: Sequence[str], queue: rq_jobs.QueueKeys | None = None) -> list[EarlierJob]:
    """Return those of the jobs that Redis has, all of one moment. queue: where they are looked for as well."""
    keys = () if queue is None else (queue.waiting, queue.popped)
    with connection.pipeline() as pipe:
        for key in keys:
            pipe.lrange(key, 0, -1)
        for job_id in job_ids:
            pipe.exists(rq_jobs.job_key(job_id))
            pipe.hmget(rq_jobs.job_key(job_id), "status", "origin", SUBMISSION_FIELD)
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        replies = pipe.execute()
    in_queue = {stored.text(job_id) for ids in replies[: len(keys)] for job_id in ids}
    del replies[: len(keys)]
    return [
        EarlierJob(
            job_id,
            rq_jobs.job_status(status),
            stored.text(origin or b""),
            tuple(map(stored.text, executions)),
            stored.count(stored.text(submission or b"")) or 0,
            job_id in in_queue,
        )
        for job_id, is_there, (status, origin, submission), executions in zip(
            job_ids, replies[::3], replies[1::3], replies[2::3], strict=True
        )
        if is_there
    ]


_CHUNK = 1000


def read_holders(connection: Redis, job_ids: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the executions that hold some of the jobs: job, execution and the worker's name."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        held = [
            (job_id, stored.text(execution))
            for job_id, executions in zip(job_ids, pipe.execute(), strict=True)
            for execution in executions
        ]
        for job_id, execution in held:
            pipe.hget(rq_jobs.execution_key(job_id, execution), "worker_name")
        return [(*each, stored.text(name)) for each, name in zip(held, pipe.execute(), strict=True) if name]


def num_held(connection: Redis, job_ids: Iterable[str]) -> int:
    left, found = iter(job_ids), 0
    while chunk := [rq_jobs.executions_key(job_id) for job_id in islice(left, _CHUNK)]:
        found += int(connection.exists(*chunk))
    return found


#: A run's own record is its parts; RQ's results only help while someone looks.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600
#: Jobs enqueued in one transaction, so that other clients of Redis never wait long, and memory stays flat.
CHUNK = 100
#: Entries of a queue that are read at once: Redis is busy with them for about a millisecond.
PAGE = 5000

_ALIVE = {JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED, JobStatus.CREATED}


def enqueue_shards(
    context: JobContext, queue_name: str, plan: Plan, state: RunState, shards: Sequence[int], low: int | None = None
) -> int:
    """Enqueue shards that no live job works on; return how many. Raises RunBusy, RunCancelled.

    low: rows that the second model of a cascade is asked of each shard; None for the first model's jobs.
    """
    # The queue of this model's jobs and, behind the first model's, that of the second's.
    queues = [
        _ShardQueue(context.connection, name, plan.run, is_second)
        for name, is_second in plan.queues(queue_name)[low is not None :]
    ]
    fields: dict[Any, Any] = {MODEL_FIELD: plan.model_of(is_second=low is not None).pin, KIND_FIELD: FILE}
    fields[FORMAT_FIELD] = FORMAT
    again = [] if low is None else [queue_name]
    enqueued = 0

    def prepare(shard: int, job_id: str) -> Any:
        return prepared_job(
            "jobs.score_shard",
            args=(plan.run, os.path.join(plan.spec.output, PLAN), shard, *again),
            timeout=-1,
            result_ttl=0 if plan.second and not again else RESULT_TTL_S,  # it is gone once the second is there
            failure_ttl=FAILURE_TTL_S,
            description=f"shard {shard} of run {plan.run}{', again' if again else ''}",
            job_id=job_id,
            meta=dict(context.trace) or None,
        )

    def enqueue(chunk: Sequence[int], pipe: Pipeline) -> int:
        if state.is_cancelled():
            raise RunCancelled(plan.run)
        submission, cancelled = state.submission(), state.submission("cancelled_submission")
        found = [each for queue in queues for each in queue.look(chunk, cancelled)]
        alive = {job_shard(plan.run, job.id) for job, is_alive in found if is_alive}
        waiting = {shard: shard_job_id(plan.run, shard, low is not None) for shard in chunk if shard not in alive}
        pipe.multi()
        state.take_turn(pipe)
        for job, is_alive in found:
            if not is_alive:
                job.delete(pipe, from_queue=job.origin != queues[0].queue.name)
                pipe.delete(results_key(job.id))
            elif 0 < cancelled >= job.submission:  # it is the newest submission's from now on
                pipe.hset(job_key(job.id), SUBMISSION_FIELD, str(submission))
        if waiting:  # also of one that is stopped while this is prepared
            pipe.zrem(queues[0].keys.failed, *waiting.values())
        queues[0].queue.enqueue_many([prepare(shard, job_id) for shard, job_id in waiting.items()], pipeline=pipe)
        for shard, job_id in waiting.items():
            rows = plan.shards[shard].rows * plan.spec.n if low is None else low
            pipe.hset(job_key(job_id), mapping={**fields, SEQUENCES_FIELD: rows, SUBMISSION_FIELD: submission})
        return len(waiting)

    for start in range(0, len(shards), CHUNK):
        context.check_interrupted()
        # Or not at all: two planners never write at once.
        enqueued += state.write(partial(enqueue, shards[start : start + CHUNK]))
    return enqueued


class _ShardQueue:
    """A run's jobs on a queue, of one model. Which stand there is read once; for others all is looked at again."""

    def __init__(self, connection: Redis, name: str, run: str, is_second: bool) -> None:
        self.queue, self.keys = job_queue(connection, name), rq_jobs.QueueKeys(name)
        self._connection, self._run, self._is_second = connection, run, is_second

    def look(self, shards: Sequence[int], cancelled: int) -> list[tuple[EarlierJob, bool]]:
        """Return the shards' jobs that there are, and whether each will bring its shard to an end."""
        ids = [shard_job_id(self._run, shard, self._is_second) for shard in shards]
        jobs = read_earlier(self._connection, ids)
        queued = {job.id for job in jobs if job.status == JobStatus.QUEUED and not job.executions}
        if queued and not queued <= self._found:
            jobs = read_earlier(self._connection, ids, self.keys)
        else:
            jobs = [replace(job, in_queue=job.id in queued) for job in jobs]
        return [(job, self._is_alive(job, cancelled)) for job in jobs]

    def _is_alive(self, job: EarlierJob, cancelled: int) -> bool:
        if 0 < cancelled >= job.submission:  # one that is held since before a cancel ends without its part
            return job.status == JobStatus.QUEUED and job.in_queue and not job.executions
        if job.executions:
            return True
        # A worker that was killed between taking a job and starting it may leave it "queued" on no queue.
        is_lost = job.status == JobStatus.QUEUED and job.origin == self.queue.name and not job.in_queue
        return job.status in _ALIVE and not is_lost

    @cached_property
    def _found(self) -> set[str]:
        """Return the run's jobs that were on the queue, or taken from it by a worker of RQ's own."""
        found: set[str] = set()
        for key in (self.keys.waiting, self.keys.popped):
            start = 0
            while page := cast("list[bytes]", self._connection.lrange(key, start, start + PAGE - 1)):
                start += PAGE
                found.update(each for each in map(stored.text, page) if job_shard(self._run, each) is not None)
        return found
