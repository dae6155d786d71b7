"""Submits and cancels runs: what the command line does, without the terminal."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import WatchError
from rq import Queue
from rq.command import send_command
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from . import stored
from ._inline import check_sampling
from .error_limit import ErrorLimit
from .errors import PlanningUnderWay
from .holders import executions_key, holders
from .keys import MODEL_FIELD
from .parquet.local_check import check_columns_here
from .parquet.names import shard_job_id
from .parquet.paths import local_path
from .parquet.plan import MAX_SHARDS
from .parquet.spec import RunSpec, check_queue_name
from .run_output import RunOutput
from .run_state import RunState
from .served_model import parse_model

if TYPE_CHECKING:
    from redis import Redis

#: Reading the footers of many thousand files takes minutes; RQ's default is 3 minutes.
PLAN_TIMEOUT_S = 3600
PLAN_RESULT_TTL_S = 7 * 24 * 3600

#: Jobs handled in one transaction.
CHUNK = 500


@dataclass(frozen=True)
class Cancelled:
    """How many jobs of a run were taken from the queue, and how many were stopped in a worker."""

    removed: int
    stopped: int


def submit_run(
    connection: Redis,
    queue_name: str,
    *,
    model: str | None = None,
    redo_damaged: bool = False,
    max_errors: int | str | None = None,
    **arguments: Any,
) -> str:
    """Enqueue the planning of a run unless it is already under way; return the run's id.

    model: only a worker that serves it by this name plans the run, or resumes it. redo_damaged: parts that
    are not what the run has written are removed and computed again. max_errors: see jobs.score_parquet.
    arguments: those of jobs.score_parquet; relative paths start at the working directory.
    Raises InvalidJob or UnsupportedScheme before anything is enqueued.
    """
    spec, model = RunSpec.from_arguments(**arguments), parse_model(model)
    limit = ErrorLimit.parse(max_errors)
    check_queue_name(queue_name)
    check_sampling(spec.sampling)
    check_columns_here(spec)
    plan_job = f"{spec.run}-plan"
    state = RunState(connection, spec.run)
    # The output as it was named: which real path it has is for the worker to say.
    own = {
        "output": local_path(arguments["output"]),
        "queue": queue_name,
        "model": model,
        "redo_damaged": redo_damaged,
        "max_errors": max_errors,
    }
    planning = {**_planning_arguments(spec), **own}
    with state.lock():
        is_under_way = _is_under_way(connection, plan_job)
        if is_under_way:
            _check_asks_the_same(connection, spec.run, plan_job, model)
            _renew_planning(connection, spec.run, plan_job, planning)
        state.submit(plan_job, spec.output, queue_name, model, limit)
        if not is_under_way:
            _enqueue_planning(connection, queue_name, plan_job, planning)
    return spec.run


def describe_again(connection: Redis, output: RunOutput) -> bool:
    """Tell Redis of a run whose keys it has lost, but not every job; return False where none is left."""
    with connection.pipeline() as pipe:
        for shard in range(output.shards):
            pipe.hget(Job.key_for(shard_job_id(output.run, shard)), "origin")
        origins = {stored.text(origin) for origin in pipe.execute() if origin}
    if not origins:
        return False
    size = {"rows": output.rows, "shards": output.shards}
    model = {"model": output.model.fingerprint, "model_text": str(output.model)}
    facts: dict[str, str | int] = {"output": output.folder, "queue": min(origins), **size, **model}
    RunState(connection, output.run).describe(facts)
    return True


def cancel_run(connection: Redis, run: str) -> Cancelled:
    """Mark a run cancelled, take its jobs from the queue and stop those that run.

    Finished parts stay; submitting the run again resumes it. Raises UnknownRun or RunBusy.
    """
    state = RunState(connection, run)
    facts = state.facts()
    with state.lock() as lock:  # a planner is either done enqueueing, or will see the mark
        state.mark_cancelled()
        done = state.parts()
        num_shards = min(stored.count(facts.get("shards")) or 0, MAX_SHARDS)
        ids = [shard_job_id(run, shard) for shard in range(num_shards) if shard not in done]
        if "plan_job" in facts:
            ids.append(facts["plan_job"])
        queue = Queue(facts["queue"], connection=connection, serializer=JSONSerializer)
        removed = stopped = 0
        for start in range(0, len(ids), CHUNK):
            state.keep(lock)
            chunk = ids[start : start + CHUNK]
            removed += _remove_queued(queue, chunk)
            stopped += _stop_held(connection, chunk)
    return Cancelled(removed, stopped)


def remove_waiting(connection: Redis, queue_name: str, job_ids: Sequence[str]) -> int:
    """Take those of the jobs from their queue that wait on it; return how many."""
    queue = Queue(queue_name, connection=connection, serializer=JSONSerializer)
    chunks = (job_ids[start : start + CHUNK] for start in range(0, len(job_ids), CHUNK))
    return sum(_remove_queued(queue, chunk) for chunk in chunks)


def _enqueue_planning(connection: Redis, queue_name: str, plan_job: str, arguments: dict[str, Any]) -> None:
    queue = Queue(queue_name, connection=connection, serializer=JSONSerializer)
    with connection.pipeline() as pipe:
        queue.enqueue_call(
            "jobs.score_parquet",
            kwargs=arguments,
            timeout=PLAN_TIMEOUT_S,
            result_ttl=PLAN_RESULT_TTL_S,
            failure_ttl=PLAN_RESULT_TTL_S,
            description=f"plan run {plan_job.removesuffix('-plan')}",
            job_id=plan_job,
            pipeline=pipe,
        )
        if arguments["model"] is not None:
            pipe.hset(Job.key_for(plan_job), MODEL_FIELD, arguments["model"])
        pipe.execute()


def _planning_arguments(spec: RunSpec) -> dict[str, Any]:
    """Return the keyword arguments of jobs.score_parquet that give this spec."""
    return {name: value for name, value in spec.to_json().items() if value is not None}


def _is_under_way(connection: Redis, plan_job: str) -> bool:
    """Say whether the planning job waits or runs; remove one that is over."""
    try:
        job = Job.fetch(plan_job, connection, JSONSerializer)
    except NoSuchJobError:
        return False
    status = job.get_status()
    if status == JobStatus.STARTED or connection.exists(executions_key(plan_job)):
        return True
    if status == JobStatus.QUEUED and _is_on_its_queue(job):
        return True
    job.delete()
    return False


def _check_asks_the_same(connection: Redis, run: str, plan_job: str, model: str | None) -> None:
    """Raise PlanningUnderWay when the planning that waits or runs asks for another model."""
    stored = cast("bytes | None", connection.hget(Job.key_for(plan_job), MODEL_FIELD))
    asked_for = None if stored is None else stored.decode()
    if asked_for != model:
        name = "whichever plans it" if asked_for is None else repr(asked_for)
        raise PlanningUnderWay(run, f"for model {name}")


def _renew_planning(connection: Redis, run: str, plan_job: str, arguments: dict[str, Any]) -> None:
    """Give a planning that waits the newest arguments, where it stands in the queue.

    A wish to redo damaged parts stays.
    Raises PlanningUnderWay when it was claimed already, and would not redo damaged parts as is asked now.
    """
    job = Job.fetch(plan_job, connection, JSONSerializer)
    redoes_already = bool((job.kwargs or {}).get("redo_damaged"))
    job.kwargs = {**arguments, "redo_damaged": arguments["redo_damaged"] or redoes_already}
    with connection.pipeline() as pipe:
        pipe.watch(executions_key(plan_job))  # type: ignore[no-untyped-call]
        if not pipe.exists(executions_key(plan_job)):
            pipe.multi()
            pipe.hset(job.key, "data", zlib.compress(job.data))
            try:
                pipe.execute()
            except WatchError:  # claimed just now
                pass
            else:
                return
    if arguments["redo_damaged"] and not redoes_already:
        raise PlanningUnderWay(run, "without redoing damaged parts")


def _is_on_its_queue(job: Job) -> bool:
    """A worker that was killed between taking a job and starting it may leave it "queued" on no queue."""
    queue = Queue(job.origin, connection=job.connection, serializer=JSONSerializer)
    keys = (queue.key, queue.intermediate_queue_key)
    return any(job.connection.lpos(key, job.id) is not None for key in keys)


def _remove_queued(queue: Queue, job_ids: Sequence[str]) -> int:
    """Delete those of the jobs that are still on the queue: what LREM took, no worker can claim."""
    with queue.connection.pipeline() as pipe:
        for job_id in job_ids:
            pipe.lrem(queue.key, 1, job_id)
        taken = [job_id for job_id, count in zip(job_ids, pipe.execute(), strict=True) if count]
        for job_id in taken:
            pipe.delete(Job.key_for(job_id))
        pipe.execute()
    return len(taken)


def _stop_held(connection: Redis, job_ids: Sequence[str]) -> int:
    """Tell the workers that hold some of the jobs to stop them; return how many those are."""
    held = holders(connection, job_ids)
    for job_id, worker in held.items():
        send_command(connection, worker, "stop-job", job_id=job_id)
    return len(held)
