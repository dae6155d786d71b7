"""Enqueues shard jobs, each once however often a run is planned."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.client import Pipeline

from jobs.common.keys import FILE, KIND_FIELD, MODEL_FIELD, SEQUENCES_FIELD, SUBMISSION_FIELD
from jobs.common.rq_jobs import JobQueue, JobStatus, job_key, prepared_job, results_key
from jobs.context import JobContext
from jobs.errors import RunCancelled
from jobs.runs.plans.names import PLAN, shard_job_id
from jobs.runs.plans.plan import Plan
from jobs.runs.redis_state.run_jobs import EarlierJob, WaitingJobs, read_earlier
from jobs.runs.redis_state.state import RunState

#: A run's own record is its parts; RQ's results only help while someone looks.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600

#: Jobs enqueued in one transaction, so that other clients of Redis never wait long, and memory stays flat.
CHUNK = 100

_ALIVE = {JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED, JobStatus.CREATED}


@dataclass(frozen=True)
class Phase:
    """Whose jobs are enqueued: what they have in common. queue: the run's. low: rows that the second model of a cascade
    is asked of each shard; None for the first model's jobs."""

    plan: Plan
    queue: str
    meta: Mapping[str, str]
    low: int | None = None

    @property
    def queues(self) -> list[tuple[str, bool]]:
        """Return those of this phase's jobs and of later ones, as of the plan."""
        return self.plan.queues(self.queue)[self.low is not None :]


def enqueue_shards(
    context: JobContext, queue_name: str, plan: Plan, state: RunState, shards: Sequence[int], low: int | None = None
) -> int:
    """Enqueue shards that no live job works on; return how many. low: as of Phase. Raises RunBusy, RunCancelled."""
    enqueued, phase = 0, Phase(plan, queue_name, dict(context.trace), low)
    queues = [WaitingJobs(JobQueue(context.connection, name), plan.run) for name, _ in phase.queues]
    for start in range(0, len(shards), CHUNK):
        context.check_interrupted()
        chunk = partial(_enqueue_chunk, queues, phase, state, shards[start : start + CHUNK])
        enqueued += state.write(chunk)  # or not at all: two planners never write at once
    return enqueued


def _enqueue_chunk(
    queues: Sequence[WaitingJobs], phase: Phase, state: RunState, shards: Sequence[int], pipe: Pipeline
) -> int:
    plan, queue = phase.plan, queues[0].queue
    if state.is_cancelled():
        raise RunCancelled(plan.run)
    submission, cancelled = state.submission(), state.cancelled_submission()
    found, alive = list[EarlierJob](), set[str]()
    ids = [{shard: shard_job_id(plan.run, shard, is_second) for shard in shards} for _, is_second in phase.queues]
    for on_queue, of_shards in zip(queues, ids, strict=True):
        jobs = _look(on_queue, list(of_shards.values()))
        found += jobs
        alive |= {job.id for job in jobs if _is_alive(job, on_queue.queue.name, cancelled)}
    waiting = {shard: ids[0][shard] for shard in shards if alive.isdisjoint(each[shard] for each in ids)}
    pipe.multi()
    state.take_turn(pipe)
    for job in found:
        if job.id not in alive:
            job.delete(pipe, from_queue=job.origin != queue.name)
            pipe.delete(results_key(job.id))
        elif 0 < cancelled >= job.submission:  # it is the newest submission's from now on
            pipe.hset(job_key(job.id), SUBMISSION_FIELD, str(submission))
    if waiting:  # also of one that is stopped while this is prepared
        pipe.zrem(queue.keys.failed, *waiting.values())
    queue.enqueue_many(pipe, [_job(phase, shard, job_id) for shard, job_id in waiting.items()])
    for shard, job_id in waiting.items():
        fields: dict[Any, Any] = {
            SEQUENCES_FIELD: plan.shards[shard].rows * plan.spec.n if phase.low is None else phase.low,
            MODEL_FIELD: plan.model_of(is_second=phase.low is not None).fingerprint,
            SUBMISSION_FIELD: submission,
            KIND_FIELD: FILE,
        }
        pipe.hset(job_key(job_id), mapping=fields)
    return len(waiting)


def _is_alive(job: EarlierJob, queue: str, cancelled: int) -> bool:
    """Whether the job will bring its shard to an end: one that is held since before a cancel will not."""
    if 0 < cancelled >= job.submission:
        return job.waits
    if job.executions:
        return True
    # A worker that was killed between taking a job and starting it may leave it "queued" on no queue.
    is_lost = job.status == JobStatus.QUEUED and job.origin == queue and not job.in_queue
    return job.status in _ALIVE and not is_lost


def _look(on_queue: WaitingJobs, job_ids: Sequence[str]) -> list[EarlierJob]:
    """Look at jobs; where one is queued and was not seen on the queue, at all of the queue in the same moment."""
    connection = on_queue.queue.connection
    jobs = read_earlier(connection, job_ids)
    queued = [job for job in jobs if job.status == JobStatus.QUEUED]
    known = on_queue.among([job.id for job in queued]) if queued else set()
    if all(job.id in known or job.executions for job in queued):
        return [replace(job, in_queue=job.id in known) for job in jobs]
    return read_earlier(connection, job_ids, on_queue.queue.keys)


def _job(phase: Phase, shard: int, job_id: str) -> Any:
    plan, is_second = phase.plan, phase.low is not None
    return prepared_job(
        "jobs.score_shard",
        args=(plan.run, os.path.join(plan.spec.output, PLAN), shard, *([phase.queue] if is_second else [])),
        timeout=-1,
        result_ttl=0 if plan.second and not is_second else RESULT_TTL_S,  # it is gone once the second is there
        failure_ttl=FAILURE_TTL_S,
        description=f"shard {shard} of run {plan.run}{', again' if is_second else ''}",
        job_id=job_id,
        meta=dict(phase.meta) or None,
    )
