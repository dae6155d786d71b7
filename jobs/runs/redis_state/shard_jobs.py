"""Enqueues shard jobs, each once however often a run is planned."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jobs.common import stored
from jobs.common.keys import FILE, KIND_FIELD, MODEL_FIELD, SEQUENCES_FIELD, SUBMISSION_FIELD
from jobs.common.rq_jobs import JobQueue, JobStatus, executions_key, job_key, prepared_job, results_key
from jobs.context import JobContext
from jobs.runs.plans.names import PLAN, shard_job_id
from jobs.runs.plans.plan import Plan
from jobs.runs.redis_state.earlier_jobs import WaitingJobs, read_earlier
from jobs.runs.redis_state.state import RunState

if TYPE_CHECKING:
    from redis.client import Pipeline

#: A run's own record is its parts; RQ's results only help while someone looks.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600

#: Jobs enqueued in one transaction, so that other clients of Redis never wait long, and memory stays flat.
CHUNK = 100

NO_FLAGS: Mapping[str, bool] = MappingProxyType({})

_ALIVE = {JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED, JobStatus.CREATED}


def enqueue_shards(
    context: JobContext,
    queue_name: str,
    plan: Plan,
    state: RunState,
    shards: Sequence[int],
    how: Mapping[str, bool] = NO_FLAGS,
) -> int:
    """Enqueue those of the shards that no live job is working on; return how many.

    how: further arguments of jobs.score_shard: redo_damaged, retry_errors.
    Raises RunBusy when another planner holds the run's lock, or has this one's job, RunCancelled when
    `cancel` came in between, and between two chunks what interrupts the job.
    """
    enqueued = 0
    with state.lock() as lock:
        waiting = WaitingJobs(JobQueue(context.connection, queue_name), plan.run)
        for start in range(0, len(shards), CHUNK):
            context.check_interrupted()
            meta = dict(context.trace)
            part = shards[start : start + CHUNK]
            chunk = partial(_enqueue_chunk, waiting, plan, state, part, how, meta)
            enqueued += state.write(lock, chunk)  # or not at all: two planners never write at once
    return enqueued


def _enqueue_chunk(
    on_queue: WaitingJobs,
    plan: Plan,
    state: RunState,
    shards: Sequence[int],
    how: Mapping[str, bool],
    meta: Mapping[str, str],
    pipe: Pipeline,
) -> int:
    state.check_not_cancelled()
    submission = state.submission()
    ids = {shard: shard_job_id(plan.run, shard) for shard in shards}
    queue = on_queue.queue
    look = _look(on_queue, list(ids.values()), state.cancelled_submission())
    waiting = [shard for shard, job_id in ids.items() if not look.is_alive(job_id)]
    old_jobs = read_earlier(queue.connection, [ids[shard] for shard in waiting])
    pipe.multi()
    for job in old_jobs:
        job.delete(pipe, from_queue=job.origin != queue.name)
        pipe.delete(results_key(job.id))
    if waiting:  # also of one that is stopped while this is prepared
        pipe.zrem(queue.keys.failed, *(ids[shard] for shard in waiting))
    queue.enqueue_many(pipe, [_job(plan, shard, ids[shard], how, meta) for shard in waiting])
    for shard in waiting:
        fields: dict[Any, Any] = {
            SEQUENCES_FIELD: plan.shards[shard].rows * plan.spec.n,
            MODEL_FIELD: plan.model.fingerprint,
            SUBMISSION_FIELD: submission,
            KIND_FIELD: FILE,
        }
        pipe.hset(job_key(ids[shard]), mapping=fields)
    for job_id in look.reprieved:
        pipe.hset(job_key(job_id), SUBMISSION_FIELD, str(submission))
    pipe.execute()
    return len(waiting)


@dataclass(frozen=True)
class _JobSeen:
    """A shard's job at one moment. is_held: by a worker. submission: the one that enqueued it."""

    status: str | None
    origin: str | None
    submission: int
    is_held: bool
    in_queue: bool

    @classmethod
    def parse(cls, fields: Sequence[bytes | None], num_executions: int, in_queue: bool) -> _JobSeen:
        status, origin, submission = (stored.text(field) if field else None for field in fields)
        return cls(status, origin, stored.count(submission) or 0, num_executions > 0, in_queue)


@dataclass(frozen=True)
class _Look:
    """The jobs of some shards at one moment.

    queue: where they are enqueued. cancelled: the last submission of the run that was.
    """

    queue: str
    cancelled: int
    jobs: dict[str, _JobSeen]

    def is_alive(self, job_id: str) -> bool:
        """Whether the job will bring its shard to an end: one that is held since before a cancel will not."""
        job = self.jobs[job_id]
        if self._was_cancelled(job):
            return self._waits_here(job)
        if job.is_held:
            return True
        # A worker that was killed between taking a job and starting it may leave it "queued" on no queue.
        is_lost = job.status == JobStatus.QUEUED and job.origin == self.queue and not job.in_queue
        return job.status in _ALIVE and not is_lost

    @property
    def reprieved(self) -> list[str]:
        """Jobs that still wait on the queue since before the run was cancelled: they are the newest
        submission's from now on."""
        return [
            job_id for job_id, job in self.jobs.items() if self._was_cancelled(job) and self._waits_here(job)
        ]

    def _was_cancelled(self, job: _JobSeen) -> bool:
        return 0 < self.cancelled >= job.submission

    def _waits_here(self, job: _JobSeen) -> bool:
        return job.status == JobStatus.QUEUED and job.in_queue and not job.is_held


def _look(on_queue: WaitingJobs, job_ids: Collection[str], cancelled: int) -> _Look:
    """Look at jobs, and where it matters at which of them are on the queue: it may hold a million others.

    One that was on it and is queued now is on it still. Another may have come back since, so all of it is
    read in the same moment as the jobs.
    """
    queue = on_queue.queue
    jobs = _read(queue, job_ids, with_queue=False)
    queued = [job_id for job_id, job in jobs.items() if job.status == JobStatus.QUEUED]
    if not queued:
        return _Look(queue.name, cancelled, jobs)
    known = on_queue.among(queued)
    if all(job_id in known or jobs[job_id].is_held for job_id in queued):
        found = {job_id: replace(job, in_queue=job_id in known) for job_id, job in jobs.items()}
        return _Look(queue.name, cancelled, found)
    return _Look(queue.name, cancelled, _read(queue, job_ids, with_queue=True))


def _read(queue: JobQueue, job_ids: Collection[str], with_queue: bool) -> dict[str, _JobSeen]:
    """Read the jobs, and whether they are on the queue, all of one moment."""
    keys = (queue.keys.waiting, queue.keys.popped) if with_queue else ()
    with queue.connection.pipeline() as pipe:
        for key in keys:
            pipe.lrange(key, 0, -1)
        for job_id in job_ids:
            pipe.hmget(job_key(job_id), "status", "origin", SUBMISSION_FIELD)
            pipe.zcard(executions_key(job_id))
        replies = pipe.execute()
    in_queue = {stored.text(job_id) for ids in replies[: len(keys)] for job_id in ids}
    read = zip(job_ids, replies[len(keys) :: 2], replies[len(keys) + 1 :: 2], strict=True)
    return {job_id: _JobSeen.parse(fields, held, job_id in in_queue) for job_id, fields, held in read}


def _job(plan: Plan, shard: int, job_id: str, how: Mapping[str, bool], meta: Mapping[str, str]) -> Any:
    return prepared_job(
        "jobs.score_shard",
        args=(plan.run, os.path.join(plan.spec.output, PLAN), shard),
        kwargs=dict(how) or None,
        timeout=-1,
        result_ttl=RESULT_TTL_S,
        failure_ttl=FAILURE_TTL_S,
        description=f"shard {shard} of run {plan.run}",
        job_id=job_id,
        meta=dict(meta) or None,
    )
