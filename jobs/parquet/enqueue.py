"""Enqueues shard jobs, each once however often a run is planned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rq import Queue
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer

from .. import stored
from ..context import JobContext
from ..holders import executions_key
from ..keys import FILE, KIND_FIELD, MODEL_FIELD, SEQUENCES_FIELD
from .names import PLAN, shard_job_id
from .run_folder import RunFolder

#: A run's own record is its parts; RQ's results only help while someone looks.
RESULT_TTL_S = 24 * 3600
FAILURE_TTL_S = 7 * 24 * 3600

#: Jobs enqueued in one transaction, so that other clients of Redis never wait long, and memory stays flat.
CHUNK = 100

_ALIVE = {JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED, JobStatus.CREATED}


def enqueue_shards(context: JobContext, queue_name: str, folder: RunFolder, shards: Sequence[int]) -> int:
    """Enqueue those of the shards that no live job is working on; return how many.

    Raises RunBusy when another planner holds the run's lock, RunCancelled when `cancel` came in between, and
    between two chunks what interrupts the job.
    """
    queue = Queue(queue_name, connection=context.connection, serializer=JSONSerializer)
    enqueued = 0
    with folder.state.lock() as lock:
        for start in range(0, len(shards), CHUNK):
            context.check_interrupted()
            folder.state.keep(lock)  # fails when another has it, so that two planners never write at once
            folder.state.check_not_cancelled()
            enqueued += _enqueue_chunk(queue, folder, shards[start : start + CHUNK])
    return enqueued


def _enqueue_chunk(queue: Queue, folder: RunFolder, shards: Sequence[int]) -> int:
    ids = {shard: shard_job_id(folder.plan.run, shard) for shard in shards}
    waiting = _without_live_jobs(queue, ids)
    old_jobs = Job.fetch_many([ids[shard] for shard in waiting], queue.connection, JSONSerializer)
    with queue.connection.pipeline() as pipe:
        for job in old_jobs:
            if job is not None:
                job.delete(pipeline=pipe, remove_from_queue=False)
                pipe.delete(Result.get_key(job.id))  # type: ignore[no-untyped-call]
        queue.enqueue_many([_job_data(folder, shard, ids[shard]) for shard in waiting], pipeline=pipe)
        for shard in waiting:
            fields: dict[Any, Any] = {
                SEQUENCES_FIELD: folder.plan.shards[shard].rows,
                MODEL_FIELD: folder.plan.model.fingerprint,
                KIND_FIELD: FILE,
            }
            pipe.hset(Job.key_for(ids[shard]), mapping=fields)
        pipe.execute()
    return len(waiting)


def _without_live_jobs(queue: Queue, ids: dict[int, str]) -> list[int]:
    """Return the shards that need a job."""
    states, in_queue = _look(queue, ids.values(), with_queue=False)
    if any(state[0] == JobStatus.QUEUED.encode() for state in states):
        # Only now: the queue may hold a million jobs of others. Both from one snapshot.
        states, in_queue = _look(queue, ids.values(), with_queue=True)
    return [
        shard
        for (shard, job_id), state in zip(ids.items(), states, strict=True)
        if not _is_alive(queue, job_id, state, in_queue)
    ]


def _look(
    queue: Queue, job_ids: Iterable[str], with_queue: bool
) -> tuple[list[tuple[bytes | None, bytes | None, int]], set[str]]:
    """Return status, origin and executions of each job, and the ids on the queue, all of one moment."""
    keys = (queue.key, queue.intermediate_queue_key) if with_queue else ()
    with queue.connection.pipeline() as pipe:
        for key in keys:
            pipe.lrange(key, 0, -1)
        for job_id in job_ids:
            pipe.hmget(Job.key_for(job_id), "status", "origin")
            pipe.zcard(executions_key(job_id))
        replies = pipe.execute()
    fields, executions = replies[len(keys) :: 2], replies[len(keys) + 1 :: 2]
    states = [(status, origin, held) for (status, origin), held in zip(fields, executions, strict=True)]
    return states, {stored.text(job_id) for ids in replies[: len(keys)] for job_id in ids}


def _is_alive(
    queue: Queue, job_id: str, state: tuple[bytes | None, bytes | None, int], in_queue: set[str]
) -> bool:
    status, origin = (stored.text(field) if field else None for field in state[:2])
    if state[2]:
        return True
    if status not in _ALIVE:
        return False
    # A worker that was killed between taking a job and starting it may leave it "queued" on no queue.
    is_lost = status == JobStatus.QUEUED and origin == queue.name and job_id not in in_queue
    return not is_lost


def _job_data(folder: RunFolder, shard: int, job_id: str) -> Any:
    return Queue.prepare_data(
        "jobs.score_shard",
        args=(folder.plan.run, folder.path(PLAN), shard),
        timeout=-1,
        result_ttl=RESULT_TTL_S,
        failure_ttl=FAILURE_TTL_S,
        description=f"shard {shard} of run {folder.plan.run}",
        job_id=job_id,
    )
