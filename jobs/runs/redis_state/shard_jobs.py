"""Reads and enqueues a run's jobs. Each job is enqueued once, however often the run is planned.

RQ's executions show which worker holds a job. The job's status does not: while a job waits inside a worker, its status
is still "queued".
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

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
    """A job that is already in Redis.

    status: None if it is unknown. origin: the name of the job's queue.
    executions: the ids of the executions that hold the job.
    submission: the number of the run's submission that enqueued the job. in_queue: whether the job was found on the
    queue that was searched.
    """

    id: str
    status: JobStatus | None
    origin: str
    executions: tuple[str, ...]
    submission: int = 0
    in_queue: bool = False

    def was_cancelled(self, last_cancelled: int) -> bool:
        """Whether the run was cancelled after the job was enqueued.

        last_cancelled: the number of the run's last cancelled submission, 0 for none.
        """
        return last_cancelled > 0 and self.submission <= last_cancelled

    def delete(self, pipe: Pipeline, from_queue: bool = True) -> None:
        """Have `pipe` delete the job as RQ's `Job.delete` does. from_queue: whether to take the job off its queue."""
        keys = rq_jobs.QueueKeys(self.origin)
        if from_queue:
            pipe.lrem(keys.waiting, 1, self.id)
        registries = (
            keys.finished,
            keys.failed,
            keys.deferred,
            keys.ready,
            keys.scheduled,
            keys.cancelled,
        )
        for registry in registries:
            pipe.zrem(registry, self.id)
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
    """Return the jobs that Redis has, all read at one moment. Other ids are left out.

    queue: the queue that is searched for the jobs, to set `in_queue`. If it is None, `in_queue` is False.
    """
    queue_keys = () if queue is None else (queue.waiting, queue.popped)
    with connection.pipeline() as pipe:
        for key in queue_keys:
            pipe.lrange(key, 0, -1)
        for job_id in job_ids:
            pipe.exists(rq_jobs.job_key(job_id))
            pipe.hmget(rq_jobs.job_key(job_id), "status", "origin", SUBMISSION_FIELD)
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        replies = iter(pipe.execute())

    # The replies come in the order of the commands above.
    in_queue: set[str] = set()
    for _ in queue_keys:
        queued_ids = next(replies)
        in_queue.update(map(stored.text, queued_ids))

    jobs = []
    for job_id in job_ids:
        is_there = next(replies)
        status, origin, submission = next(replies)
        executions = next(replies)
        if not is_there:
            continue
        submission_text = stored.text(submission or b"")
        job = EarlierJob(
            id=job_id,
            status=rq_jobs.job_status(status),
            origin=stored.text(origin or b""),
            executions=tuple(map(stored.text, executions)),
            submission=stored.count(submission_text) or 0,
            in_queue=job_id in in_queue,
        )
        jobs.append(job)
    return jobs


class Holder(NamedTuple):
    """An execution of a job by a worker. worker: the worker's name."""

    job_id: str
    execution_id: str
    worker: str


def read_holders(connection: Redis, job_ids: Sequence[str]) -> list[Holder]:
    """Return the executions of the jobs. A job that no worker has claimed has none."""
    with connection.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.zrange(rq_jobs.executions_key(job_id), 0, -1)
        executions_of_jobs = pipe.execute()
        executions = []  # pairs of a job's id and an execution's id
        for job_id, execution_ids in zip(job_ids, executions_of_jobs, strict=True):
            for execution_id in execution_ids:
                executions.append((job_id, stored.text(execution_id)))

        for job_id, execution_id in executions:
            pipe.hget(rq_jobs.execution_key(job_id, execution_id), "worker_name")
        worker_names = pipe.execute()

    holders = []
    for (job_id, execution_id), name in zip(executions, worker_names, strict=True):
        if name:
            holders.append(Holder(job_id, execution_id, stored.text(name)))
    return holders


#: The most jobs that one EXISTS looks for.
_CHUNK = 1000


def count_held(connection: Redis, job_ids: Iterable[str]) -> int:
    """Return how many of the jobs are held by workers."""
    keys = map(rq_jobs.executions_key, job_ids)
    count = 0
    while True:
        chunk = list(islice(keys, _CHUNK))
        if not chunk:
            return count
        count += int(connection.exists(*chunk))


#: How long RQ keeps the jobs' results. They are for people only: parts tell which shards are done.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600
#: The most jobs that one transaction enqueues. The number is small, so that other clients of Redis never wait long.
CHUNK = 100
#: The most entries of a queue that one command reads. This many keep Redis busy for about a millisecond.
PAGE = 5000

#: A job with one of these statuses still waits for a worker or runs.
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
    rows_for_second: int | None = None,
) -> int:
    """Enqueue a job for each shard that has no live job; return how many. Raises RunBusy, RunCancelled.

    queue_name: the run's queue.
    rows_for_second: None enqueues jobs for the run's first model. A number enqueues a job for a cascade's second model.
    It is the most rows that this model may be asked about, and `shards` then has one shard.
    """
    shard_jobs = _ShardJobs(context, queue_name, plan, state, rows_for_second)
    num_enqueued = 0
    for start in range(0, len(shards), CHUNK):
        context.check_interrupted()
        chunk = shards[start : start + CHUNK]
        # If another planner writes at the same time, `enqueue` is called again for the same chunk.
        num_enqueued += state.write(partial(shard_jobs.enqueue, chunk))
    return num_enqueued


class _ShardJob(NamedTuple):
    """A shard's job. is_alive: whether the job computes the shard, or still waits to compute it."""

    job: EarlierJob
    is_alive: bool


class _ShardJobs:
    """Enqueues the jobs of shards, all for one model of the run. Arguments: see enqueue_shards."""

    def __init__(
        self,
        context: JobContext,
        queue_name: str,
        plan: Plan,
        state: RunState,
        rows_for_second: int | None,
    ) -> None:
        self._context = context
        self._queue_name = queue_name
        self._plan = plan
        self._state = state
        self._rows_for_second = rows_for_second
        self._is_second = rows_for_second is not None
        # A job for the second model stands in another queue. If a shard has such a job, it needs no job for the first
        # model. So both queues are searched before jobs for the first model are enqueued.
        self._queues = []
        for name, is_for_second in plan.queues(queue_name):
            if self._is_second and not is_for_second:
                continue
            self._queues.append(_ShardQueue(context.connection, name, plan.run, is_for_second))
        # `plan.queues` begins with the first model's queue. So this is the queue of the model that is asked.
        self._target = self._queues[0]

    def enqueue(self, shards: Sequence[int], pipe: Pipeline) -> int:
        """Enqueue a job for each shard that has no live job; return how many. pipe: see RunState.write."""
        if self._state.is_cancelled():
            raise RunCancelled(self._plan.run)
        submission = self._state.submission()
        last_cancelled = self._state.cancelled_submission()
        earlier_jobs: list[_ShardJob] = []
        for queue in self._queues:
            earlier_jobs += queue.find(shards, last_cancelled)

        pipe.multi()
        self._state.restart_writes(pipe)
        shards_with_job: set[int | None] = set()
        for job, is_alive in earlier_jobs:
            if not is_alive:
                self._delete(pipe, job)
                continue
            shards_with_job.add(job_shard(self._plan.run, job.id))
            if job.was_cancelled(last_cancelled):
                # The job still waits. From now on it belongs to the newest submission.
                pipe.hset(job_key(job.id), SUBMISSION_FIELD, str(submission))

        shards_without_job = [shard for shard in shards if shard not in shards_with_job]
        self._add(pipe, shards_without_job, submission)
        return len(shards_without_job)

    def _delete(self, pipe: Pipeline, job: EarlierJob) -> None:
        """Have `pipe` delete a dead job and its results."""
        # Every job on the target queue is alive, so a dead job is not there. The target queue is not searched, because
        # it may be long.
        may_be_on_queue = job.origin != self._target.queue.name
        job.delete(pipe, from_queue=may_be_on_queue)
        pipe.delete(results_key(job.id))

    def _add(self, pipe: Pipeline, shards: Sequence[int], submission: int) -> None:
        """Have `pipe` enqueue a new job for each of the shards."""
        run = self._plan.run
        job_ids = {shard: shard_job_id(run, shard, self._is_second) for shard in shards}
        if job_ids:
            # An earlier job with one of these ids may have failed after `find` looked for it. The id must not stay
            # among the failed jobs, and `_delete` is called only for jobs that `find` returned.
            pipe.zrem(self._target.keys.failed, *job_ids.values())
        jobs = [self._job(shard, job_id) for shard, job_id in job_ids.items()]
        self._target.queue.enqueue_many(jobs, pipeline=pipe)
        for shard, job_id in job_ids.items():
            pipe.hset(job_key(job_id), mapping=self._fields(shard, submission))

    def _job(self, shard: int, job_id: str) -> Any:
        """Return a shard's job, for RQ's `enqueue_many`."""
        plan = self._plan
        args = [plan.run, os.path.join(plan.spec.output, PLAN), shard]
        description = f"shard {shard} of run {plan.run}"
        if self._is_second:
            args.append(self._queue_name)  # this fourth argument makes the job ask the second model
            description += ", again"
        # In a cascade, RQ deletes the first model's job when that job ends. So only the second model's job is left.
        is_first_of_two = plan.second is not None and not self._is_second
        result_ttl = 0 if is_first_of_two else RESULT_TTL_S
        return prepared_job(
            "jobs.score_shard",
            args=tuple(args),
            timeout=-1,
            result_ttl=result_ttl,
            failure_ttl=FAILURE_TTL_S,
            description=description,
            job_id=job_id,
            meta=dict(self._context.trace) or None,
        )

    def _fields(self, shard: int, submission: int) -> dict[Any, Any]:
        """Return Tokenmill's own fields of a shard's job."""
        if self._rows_for_second is None:
            num_sequences = self._plan.shards[shard].rows * self._plan.spec.n
        else:
            # A cascade only scores labels, and each row is one sequence then.
            num_sequences = self._rows_for_second
        return {
            MODEL_FIELD: self._plan.model_of(self._is_second).pin,
            KIND_FIELD: FILE,
            FORMAT_FIELD: FORMAT,
            SEQUENCES_FIELD: num_sequences,
            SUBMISSION_FIELD: submission,
        }


class _ShardQueue:
    """The jobs that a run has on one queue for one of its models.

    is_second: whether that model is a cascade's second one.
    The queue is read once, and again only if a job with the status "queued" was not on it.
    """

    def __init__(self, connection: Redis, name: str, run: str, is_second: bool) -> None:
        self.queue = job_queue(connection, name)
        self.keys = rq_jobs.QueueKeys(name)
        self._connection = connection
        self._run = run
        self._is_second = is_second

    def find(self, shards: Sequence[int], last_cancelled: int) -> list[_ShardJob]:
        """Return the jobs that the shards have.

        last_cancelled: the number of the last cancelled submission, 0 for none.
        """
        job_ids = [shard_job_id(self._run, shard, self._is_second) for shard in shards]
        jobs = read_earlier(self._connection, job_ids)
        expected_ids = set()  # the jobs that should be on the queue
        for job in jobs:
            if job.status == JobStatus.QUEUED and not job.executions:
                expected_ids.add(job.id)
        # The first use of `_ids_on_queue` reads the queue. If no job should be on the queue, it is not read.
        all_are_found = not expected_ids or expected_ids <= self._ids_on_queue
        if all_are_found:
            jobs = [replace(job, in_queue=job.id in expected_ids) for job in jobs]
        else:
            # The missing jobs came onto the queue after it was read, or are lost. So the queue is read again.
            jobs = read_earlier(self._connection, job_ids, self.keys)
        return [_ShardJob(job, self._is_alive(job, last_cancelled)) for job in jobs]

    def _is_alive(self, job: EarlierJob, last_cancelled: int) -> bool:
        """Whether a job computes its shard, or still waits to compute it."""
        if job.was_cancelled(last_cancelled):
            # A job that still waits goes over to the new submission, and will compute its shard. A worker that has
            # claimed the job ends it without a part.
            return job.status == JobStatus.QUEUED and job.in_queue and not job.executions
        if job.executions:
            return True
        # If a worker was killed between taking a job and starting it, the job may be "queued", but on no queue.
        is_lost = (
            job.status == JobStatus.QUEUED and job.origin == self.queue.name and not job.in_queue
        )
        return job.status in _ALIVE and not is_lost

    @cached_property
    def _ids_on_queue(self) -> set[str]:
        """Return the ids of the run's jobs that were on the queue when it was first read.

        Includes jobs that RQ's own workers were taking from the queue then.
        """
        ids_on_queue: set[str] = set()
        for key in (self.keys.waiting, self.keys.popped):
            start = 0
            while True:
                page: Any = self._connection.lrange(key, start, start + PAGE - 1)
                if not page:
                    break
                start += PAGE
                for job_id in map(stored.text, page):
                    if job_shard(self._run, job_id) is not None:
                        ids_on_queue.add(job_id)
        return ids_on_queue
