"""Submits, retries and cancels runs. The command line calls these functions."""

import getpass
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import FORMAT, FORMAT_FIELD, MODEL_FIELD
from jobs.common.rq_jobs import (
    JobStatus,
    QueueKeys,
    command_channel,
    executions_key,
    job_key,
    job_queue,
)
from jobs.errors import InvalidJob, PlanningUnderWay, UnknownRun
from jobs.prompts.generated import DEFAULT_MAX_TOKENS
from jobs.runs.end_notices import enqueue_notices
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

#: The most jobs that a cancel takes off a queue or stops in one transaction.
CHUNK = 500


@dataclass(frozen=True)
class Cancelled:
    """What a cancel has done.

    removed: the number of jobs that were taken off a queue. stopped: the number of running jobs that were asked to
    stop.
    """

    removed: int
    stopped: int


def submit_run(
    connection: Redis,
    queue_name: str,
    check_run: Callable[[RunSpec], None] = lambda spec: None,
    **arguments: Any,
) -> str:
    """Enqueue the planning of a run, unless a worker holds the planning job already; return the run's id.

    check_run: raises errors that planning would raise. arguments: the arguments of jobs.score_parquet.
    Raises InvalidJob or UnsupportedScheme for wrong arguments, and PlanningUnderWay if a worker already plans the run
    for another model. After an error, nothing is enqueued.
    """
    submission, run_arguments = Submission.split(queue_name, arguments)
    spec = RunSpec.from_arguments(**run_arguments)
    check_run(spec)
    run = spec.run
    plan_job = plan_job_id(run)
    state = RunState(connection, run)
    # The job gets the output's path as the caller wrote it. Links in the path may lead elsewhere on a worker's machine.
    planning_arguments = {
        **spec.to_json(),
        "output": run_path(run_arguments["output"]),
        **submission.to_arguments(),
    }

    def submit_and_plan(pipe: Pipeline) -> None:
        """Write the submission. Enqueue the planning job too, unless a worker holds it already."""
        is_held = False
        # The planning job of a cancelled run ends without a plan, so it does not count as held.
        if not state.is_cancelled():
            is_held = _is_held(connection, run, plan_job, submission.model)
        state.submit(pipe, plan_job, spec.output, submission, is_new=not is_held, by=submitter())
        if not is_held:
            _enqueue_planning(pipe, connection, submission, plan_job, planning_arguments)

    # The submission and its planning job are written together, because a submission without a job would wait for ever.
    watched_keys = [job_key(plan_job), executions_key(plan_job), QueueKeys(queue_name).popped]
    state.write(submit_and_plan, *watched_keys)
    return run


def submitter() -> str:
    """Return the user of this process and the name of this machine, as user@machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def retry_run(connection: Redis, plan: Plan, output: str, max_tokens: int | None = None) -> str:
    """Submit a run again with another output, and return the new run's id.

    The new run takes the answers of the old output, and asks again only the rows that have an error.
    max_tokens: a larger limit of tokens. Rows that ended with `length` are then asked again too. Raises InvalidJob for
    a limit that would cut the same rows again.
    """
    if max_tokens is not None:
        _check_larger(plan.spec, max_tokens)
    # Without facts of the old run, the new run is on the default queue and sends no notices.
    facts: Mapping[str, str] = {}
    with suppress(UnknownRun):
        facts = RunState(connection, plan.run).facts()
    reuse = [plan.spec.output]
    if plan.reused is not None and plan.spec.only_new:
        # The old output has only the rows that were new. The other answers are in the outputs that the old run reused.
        reuse += [run["output"] for run in plan.reused.runs]

    arguments = {
        **plan.spec.to_json(),
        "output": output,
        "reuse": reuse,
        "model": plan.model.fingerprint,
    }
    for name in (WEBHOOK, ON_END):
        if name in facts:
            arguments[name] = facts[name]
    if max_tokens is not None:
        arguments["sampling"] = {**plan.spec.sampling, "max_tokens": max_tokens}
    if plan.reused is not None:
        arguments["reuse_from_any_model"] = plan.reused.any_model
    return submit_run(connection, facts.get("queue", DEFAULT_QUEUE), **arguments)


def _check_larger(spec: RunSpec, max_tokens: int) -> None:
    """Raise InvalidJob if the run's answers could not get longer with this max_tokens."""
    column = spec.sampling_columns.get("max_tokens")
    if column is not None:
        raise InvalidJob(
            f"max_tokens comes from the column {column!r}, where a single value for the run has no effect: raise the "
            "column's values, or give another column, and submit with --reuse"
        )
    prompts = spec.prompts or ()
    if prompts and all("max_tokens" in prompt.get("sampling", {}) for prompt in prompts):
        raise InvalidJob(
            "max_tokens comes from each of the prompts, where a single value for the run has no effect: raise the "
            "prompts' values, and submit with --reuse"
        )
    limit = spec.sampling.get("max_tokens")
    if limit is None:
        limit = DEFAULT_MAX_TOKENS
    if type(limit) is int and max_tokens <= limit:
        raise InvalidJob(
            f"max_tokens {max_tokens} is not more than the {limit} that the run had, so that the same rows would be "
            "cut: give more"
        )


def cancel_run(connection: Redis, run: str) -> Cancelled:
    """Mark a run cancelled, take its waiting jobs off their queues, stop its running jobs, and enqueue its notices.

    Raises UnknownRun, or RunResubmitted if another submission came before all jobs were stopped.
    """
    state = RunState(connection, run)
    submission = int(state.facts().get("submission", 0))
    # A planner has either enqueued its jobs before this write, or sees that the run is cancelled and enqueues none.
    state.cancel(submission)

    facts = state.facts()
    num_shards = int(facts.get("shards", 0))
    shards_with_part = state.recorded_shards()
    shards = [shard for shard in range(num_shards) if shard not in shards_with_part]
    job_ids = [shard_job_id(run, shard) for shard in shards]
    if "plan_job" in facts:
        job_ids.append(facts["plan_job"])
    cancelled = _cancel_jobs(state, submission, facts["queue"], job_ids)
    if "second_queue" in facts:  # the run is a cascade
        second_job_ids = [shard_job_id(run, shard, is_second=True) for shard in shards]
        second = _cancel_jobs(state, submission, facts["second_queue"], second_job_ids)
        cancelled = Cancelled(
            cancelled.removed + second.removed, cancelled.stopped + second.stopped
        )

    has_cancelled_jobs = cancelled.removed > 0 or cancelled.stopped > 0
    had_ended = "finished" in facts and not has_cancelled_jobs
    if not had_ended:  # a run that had ended has sent its notices at its end
        enqueue_notices(state, submission, "cancelled")
    return cancelled


def _cancel_jobs(
    state: RunState, submission: int, queue_name: str, job_ids: Sequence[str]
) -> Cancelled:
    """Remove waiting jobs from their queue, and ask workers to stop the jobs that they have claimed.

    Raises RunResubmitted.
    """
    removed = remove_waiting(state, submission, queue_name, job_ids)
    stopped = 0
    for start in range(0, len(job_ids), CHUNK):
        chunk = job_ids[start : start + CHUNK]
        stopped += state.change_if_last(submission, partial(stop_held, state.connection, chunk))
    return Cancelled(removed, stopped)


def _is_nearer_to_end(connection: Redis, queue_key: str, job_ids: Sequence[str]) -> bool:
    """Whether the jobs are in the second half of the queue, so that LREM should search from the queue's end.

    Only one job's position is used: the middle job's, or the last job's if the middle job is not on the queue.
    """
    if not job_ids:
        return False
    middle = len(job_ids) // 2
    for job_id in (job_ids[middle], job_ids[-1]):
        position: Any = connection.lpos(queue_key, job_id)
        if position is not None:
            return 2 * int(position) > connection.llen(queue_key)
    return False


def remove_waiting(
    state: RunState, submission: int, queue_name: str, job_ids: Sequence[str]
) -> int:
    """Remove waiting jobs from their queue, and delete them; return how many waited. Raises RunResubmitted."""
    queue_key = QueueKeys(queue_name).waiting
    from_end = _is_nearer_to_end(state.connection, queue_key, job_ids)
    if from_end:
        job_ids = job_ids[::-1]  # LREM then searches from the end, and finds each job early

    removed = 0
    for start in range(0, len(job_ids), CHUNK):
        chunk = job_ids[start : start + CHUNK]
        taken_ids = state.change_if_last(submission, partial(_take, queue_key, chunk, from_end))
        state.change_if_last(submission, partial(_delete, taken_ids))
        removed += len(taken_ids)
    return removed


def _enqueue_planning(
    pipe: Pipeline,
    connection: Redis,
    submission: Submission,
    plan_job: str,
    arguments: dict[str, Any],
) -> None:
    """Have `pipe` delete the run's earlier planning job, if there is one, and enqueue a new planning job."""
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
    """Whether a worker already holds the planning job. Raises PlanningUnderWay if that job plans for another model."""
    jobs = read_earlier(connection, [plan_job])
    if not jobs:
        return False
    [job] = jobs
    is_popped = connection.lpos(QueueKeys(job.origin).popped, plan_job) is not None
    is_held = job.status is JobStatus.STARTED or bool(job.executions) or is_popped
    if not is_held:
        return False

    model_field: Any = connection.hget(job_key(plan_job), MODEL_FIELD)
    planned_for = None if model_field is None else stored.text(model_field)
    if planned_for != model:
        model_text = "any model" if planned_for is None else f"model {planned_for!r}"
        raise PlanningUnderWay(run, f"for {model_text}")
    return True


def _take(queue_key: str, job_ids: Sequence[str], from_end: bool, pipe: Pipeline) -> list[str]:
    """Take jobs off the queue; return the ids of the jobs that were on it. No worker can claim these jobs any more."""
    pipe.multi()
    # LREM removes one entry. The sign of the count says from which end LREM searches.
    count = -1 if from_end else 1
    for job_id in job_ids:
        pipe.lrem(queue_key, count, job_id)
    replies = pipe.execute()
    return [job_id for job_id, num_removed in zip(job_ids, replies, strict=True) if num_removed]


def _delete(job_ids: Sequence[str], pipe: Pipeline) -> None:
    """Delete the hashes of jobs, in a transaction."""
    pipe.multi()
    for job_id in job_ids:
        pipe.delete(job_key(job_id))


def stop_held(connection: Redis, job_ids: Sequence[str], pipe: Pipeline) -> int:
    """Ask the workers that hold any of these jobs to stop them; return how many of the jobs are held.

    pipe: see `transact`.
    """
    holders = read_holders(connection, job_ids)
    pipe.multi()
    for holder in holders:
        command = {
            "command": "stop-execution",
            "job_id": holder.job_id,
            "execution_id": holder.execution_id,
        }
        pipe.publish(command_channel(holder.worker), json.dumps(command))
    return len({holder.job_id for holder in holders})
