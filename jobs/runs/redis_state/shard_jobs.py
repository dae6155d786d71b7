"""Enqueues shard jobs, each once however often a run is planned."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import FILE, KIND_FIELD, MODEL_FIELD, SEQUENCES_FIELD, SUBMISSION_FIELD
from jobs.common.rq_jobs import JobQueue, JobStatus, executions_key, job_key, prepared_job, results_key
from jobs.context import JobContext
from jobs.runs.plans.names import PLAN, shard_job_id
from jobs.runs.plans.plan import Plan
from jobs.runs.redis_state.run_jobs import WaitingJobs, read_earlier
from jobs.runs.redis_state.state import RunState

#: A run's own record is its parts; RQ's results only help while someone looks.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600

#: Jobs enqueued in one transaction, so that other clients of Redis never wait long, and memory stays flat.
CHUNK = 100

_ALIVE = {JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED, JobStatus.CREATED}


def enqueue_shards(context: JobContext, queue_name: str, plan: Plan, state: RunState, shards: Sequence[int]) -> int:
    """Enqueue those of the shards that no live job is working on; return how many.

    Raises RunBusy when another planner has this one's job, RunCancelled when `cancel` came in between, and between two
    chunks what interrupts the job.
    """
    enqueued = 0
    waiting = WaitingJobs(JobQueue(context.connection, queue_name), plan.run)
    for start in range(0, len(shards), CHUNK):
        context.check_interrupted()
        chunk = partial(_enqueue_chunk, waiting, plan, state, shards[start : start + CHUNK], dict(context.trace))
        enqueued += state.write(chunk)  # or not at all: two planners never write at once
    return enqueued


def _enqueue_chunk(
    on_queue: WaitingJobs, plan: Plan, state: RunState, shards: Sequence[int], meta: Mapping[str, str], pipe: Pipeline
) -> int:
    state.check_not_cancelled()
    submission = state.submission()
    ids = {shard: shard_job_id(plan.run, shard) for shard in shards}
    queue = on_queue.queue
    seen = _look(on_queue, list(ids.values()), state.cancelled_submission())
    waiting = [shard for shard, job_id in ids.items() if not seen[job_id].is_alive(queue.name)]
    old_jobs = read_earlier(queue.connection, [ids[shard] for shard in waiting])
    pipe.multi()
    state.take_turn(pipe)
    for job in old_jobs:
        job.delete(pipe, from_queue=job.origin != queue.name)
        pipe.delete(results_key(job.id))
    if waiting:  # also of one that is stopped while this is prepared
        pipe.zrem(queue.keys.failed, *(ids[shard] for shard in waiting))
    queue.enqueue_many(pipe, [_job(plan, shard, ids[shard], meta) for shard in waiting])
    for shard in waiting:
        fields: dict[Any, Any] = {
            SEQUENCES_FIELD: plan.shards[shard].rows * plan.spec.n,
            MODEL_FIELD: plan.model.fingerprint,
            SUBMISSION_FIELD: submission,
            KIND_FIELD: FILE,
        }
        pipe.hset(job_key(ids[shard]), mapping=fields)
    for job_id, found in seen.items():
        if found.was_cancelled and found.waits:  # it is the newest submission's from now on
            pipe.hset(job_key(job_id), SUBMISSION_FIELD, str(submission))
    pipe.execute()
    return len(waiting)


@dataclass(frozen=True)
class _JobSeen:
    """A shard's job at one moment. was_cancelled: it was enqueued before the run was, the last time."""

    status: str | None
    origin: str | None
    was_cancelled: bool
    is_held: bool
    in_queue: bool

    @property
    def waits(self) -> bool:
        return self.status == JobStatus.QUEUED and self.in_queue and not self.is_held

    def is_alive(self, queue: str) -> bool:
        """Whether the job will bring its shard to an end: one that is held since before a cancel will not."""
        if self.was_cancelled:
            return self.waits
        if self.is_held:
            return True
        # A worker that was killed between taking a job and starting it may leave it "queued" on no queue.
        is_lost = self.status == JobStatus.QUEUED and self.origin == queue and not self.in_queue
        return self.status in _ALIVE and not is_lost


def _look(on_queue: WaitingJobs, job_ids: Collection[str], cancelled: int) -> dict[str, _JobSeen]:
    """Look at jobs; where one is queued and was not seen on the queue, at all of the queue in the same moment."""
    jobs = _read(on_queue.queue, job_ids, cancelled, with_queue=False)
    queued = [job_id for job_id, job in jobs.items() if job.status == JobStatus.QUEUED]
    if not queued:
        return jobs
    known = on_queue.among(queued)
    if all(job_id in known or jobs[job_id].is_held for job_id in queued):
        return {job_id: replace(job, in_queue=job_id in known) for job_id, job in jobs.items()}
    return _read(on_queue.queue, job_ids, cancelled, with_queue=True)


def _read(queue: JobQueue, job_ids: Collection[str], cancelled: int, with_queue: bool) -> dict[str, _JobSeen]:
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
    found = {}
    read = zip(job_ids, replies[len(keys) :: 2], replies[len(keys) + 1 :: 2], strict=True)
    for job_id, fields, held in read:
        status, origin, submission = (stored.text(field) if field else None for field in fields)
        was_cancelled = 0 < cancelled >= (stored.count(submission) or 0)
        found[job_id] = _JobSeen(status, origin, was_cancelled, held > 0, job_id in in_queue)
    return found


def _job(plan: Plan, shard: int, job_id: str, meta: Mapping[str, str]) -> Any:
    return prepared_job(
        "jobs.score_shard",
        args=(plan.run, os.path.join(plan.spec.output, PLAN), shard),
        timeout=-1,
        result_ttl=RESULT_TTL_S,
        failure_ttl=FAILURE_TTL_S,
        description=f"shard {shard} of run {plan.run}",
        job_id=job_id,
        meta=dict(meta) or None,
    )
