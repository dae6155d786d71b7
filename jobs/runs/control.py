"""Submits and cancels runs: what the command line does, without the terminal."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import FORMAT, FORMAT_FIELD, MODEL_FIELD
from jobs.common.rq_jobs import JobStatus, QueueKeys, command_channel, executions_key, job_key, job_queue
from jobs.errors import PlanningUnderWay, UnknownRun
from jobs.runs.end_notices import tell_of
from jobs.runs.plans.names import plan_job_id, shard_job_id
from jobs.runs.plans.paths import run_path
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.shard_jobs import read_earlier, read_holders
from jobs.runs.redis_state.state import RunState
from jobs.runs.redis_state.submission import ON_END, WEBHOOK, Submission

PLANNING = "jobs.score_parquet"
DEFAULT_QUEUE = "bulk"
#: Reading the footers of many thousand files takes minutes; RQ's default is 3 minutes.
PLAN_TIMEOUT_S = 3600
PLAN_RESULT_TTL_S = 7 * 24 * 3600

CHUNK = 500


@dataclass(frozen=True)
class Cancelled:
    removed: int
    stopped: int


def submit_run(
    connection: Redis, queue_name: str, check_run: Callable[[RunSpec], None] = lambda spec: None, **arguments: Any
) -> str:
    """Enqueue the planning of a run unless it is already under way; return the run's id.

    check_run: raises what the planning would. Raises InvalidJob or UnsupportedScheme before anything is enqueued.
    """
    submission, own = Submission.split(queue_name, arguments)
    spec = RunSpec.from_arguments(**own)
    check_run(spec)
    run = spec.run
    plan_job, state = plan_job_id(run), RunState(connection, run)
    # The output as it was named: which real path it has is for the worker to say.
    planning = {**spec.to_json(), "output": run_path(own["output"]), **submission.to_arguments()}

    def enter(pipe: Pipeline) -> None:
        is_held = not state.is_cancelled() and _is_held(connection, run, plan_job, submission.model)
        state.submit(pipe, plan_job, spec.output, submission, anew=not is_held)
        if not is_held:
            _enqueue_planning(pipe, connection, submission, plan_job, planning)

    popped = QueueKeys(queue_name).popped  # all at once: one that nobody plans would wait
    state.write(enter, job_key(plan_job), executions_key(plan_job), popped)
    return run


def retry_run(connection: Redis, plan: Plan, output: str, max_tokens: int | None = None) -> str:
    """Submit a run again into another output, and take its answers there. Return the new run's id.

    max_tokens: a larger limit; rows that ended with `length` are then asked again.
    """
    facts: Mapping[str, str] = {}
    with suppress(UnknownRun):
        facts = RunState(connection, plan.run).facts()
    calls = {name: facts[name] for name in (WEBHOOK, ON_END) if name in facts}
    named = {"output": output, "reuse": [plan.spec.output], "model": plan.model.fingerprint}
    own = {**plan.spec.to_json(), **named, **calls}
    if max_tokens is not None:
        own["sampling"] = {**plan.spec.sampling, "max_tokens": max_tokens}
    if plan.reused is not None:
        own["reuse_from_any_model"] = plan.reused.any_model
        own["reuse"] += [each["output"] for each in plan.reused.runs if plan.spec.only_new]
    return submit_run(connection, facts.get("queue", DEFAULT_QUEUE), **own)


def cancel_run(connection: Redis, run: str) -> Cancelled:
    """Mark a run cancelled, take its jobs from the queue, stop those that run, and tell whom its submission wants told.

    Raises UnknownRun, or RunResubmitted where that has happened before all its jobs were told.
    """
    state = RunState(connection, run)
    submission = int(state.facts().get("submission", 0))
    state.cancel(submission)  # a planner has enqueued before, or will see the mark
    facts, done = state.facts(), state.recorded()
    shards = [shard for shard in range(int(facts.get("shards", 0))) if shard not in done]
    removed = stopped = 0
    for field, is_second in (("queue", False), ("second_queue", True)):
        if field not in facts:
            continue
        ids = [shard_job_id(run, shard, is_second) for shard in shards]
        if "plan_job" in facts and not is_second:
            ids.append(facts["plan_job"])
        removed += remove_waiting(state, submission, facts[field], ids)
        for start in range(0, len(ids), CHUNK):
            stopped += state.as_of(submission, partial(stop_held, connection, ids[start : start + CHUNK]))
    if removed or stopped or "finished" not in facts:
        tell_of(state, submission, "cancelled")
    return Cancelled(removed, stopped)


def _is_nearer_to_end(connection: Redis, queue_key: str, job_ids: Sequence[str]) -> bool:
    """Whether these stand in the second half of the queue, as one of them tells: LREM may search from either end."""
    for job_id in (job_ids[len(job_ids) // 2], job_ids[-1]) if job_ids else ():
        place: Any = connection.lpos(queue_key, job_id)
        if place is not None:
            return 2 * int(place) > connection.llen(queue_key)
    return False


def remove_waiting(state: RunState, submission: int, queue_name: str, job_ids: Sequence[str]) -> int:
    """Take those of the jobs from their queue that wait on it; return how many. Raises RunResubmitted."""
    queue_key, removed = QueueKeys(queue_name).waiting, 0
    if from_end := _is_nearer_to_end(state.connection, queue_key, job_ids):
        job_ids = job_ids[::-1]
    for start in range(0, len(job_ids), CHUNK):
        chunk = job_ids[start : start + CHUNK]
        taken = state.as_of(submission, partial(_take, queue_key, chunk, from_end))
        state.as_of(submission, partial(_delete, taken))
        removed += len(taken)
    return removed


def _enqueue_planning(
    pipe: Pipeline, connection: Redis, submission: Submission, plan_job: str, arguments: dict[str, Any]
) -> None:
    for earlier in read_earlier(connection, [plan_job]):
        earlier.delete(pipe)
    job_queue(connection, submission.queue).enqueue_call(
        PLANNING,
        pipeline=pipe,
        kwargs=arguments,
        timeout=PLAN_TIMEOUT_S,
        result_ttl=PLAN_RESULT_TTL_S,
        failure_ttl=PLAN_RESULT_TTL_S,
        description=f"plan run {plan_job.removesuffix('-plan')}",
        job_id=plan_job,
    )
    pipe.hset(job_key(plan_job), FORMAT_FIELD, str(FORMAT))
    if submission.model is not None:
        pipe.hset(job_key(plan_job), MODEL_FIELD, submission.model)


def _is_held(connection: Redis, run: str, plan_job: str, model: str | None) -> bool:
    """Whether a worker has the planning already. Raises PlanningUnderWay where that is for another model."""
    for job in read_earlier(connection, [plan_job]):
        is_popped = connection.lpos(QueueKeys(job.origin).popped, plan_job) is not None
        if job.status is not JobStatus.STARTED and not job.executions and not is_popped:
            return False
        asked_for: Any = connection.hget(job_key(plan_job), MODEL_FIELD)
        if (asked_for and stored.text(asked_for)) != model:
            name = "whichever plans it" if asked_for is None else repr(stored.text(asked_for))
            raise PlanningUnderWay(run, f"for model {name}")
        return True
    return False


def _take(queue_key: str, job_ids: Sequence[str], from_end: bool, pipe: Pipeline) -> list[str]:
    """Take those of the jobs from the queue that are still on it: what LREM took, no worker can claim."""
    pipe.multi()
    for job_id in job_ids:
        pipe.lrem(queue_key, -1 if from_end else 1, job_id)
    return [job_id for job_id, count in zip(job_ids, pipe.execute(), strict=True) if count]


def _delete(job_ids: Sequence[str], pipe: Pipeline) -> None:
    pipe.multi()
    for job_id in job_ids:
        pipe.delete(job_key(job_id))


def stop_held(connection: Redis, job_ids: Sequence[str], pipe: Pipeline) -> int:
    """Tell the workers that hold some of the jobs to stop them; return how many those are."""
    held = read_holders(connection, job_ids)
    pipe.multi()
    for job_id, execution_id, worker in held:
        command = {"command": "stop-execution", "job_id": job_id, "execution_id": execution_id}
        pipe.publish(command_channel(worker), json.dumps(command))
    return len({job_id for job_id, *_ in held})
