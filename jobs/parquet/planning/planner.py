"""Plans a run, or resumes one. `jobs.score_parquet` calls this inside a worker."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jobs import errors
from jobs.common.workers import read_serving
from jobs.context import JobContext
from jobs.context.served_model import PinnedModel, clock_text, split_formats
from jobs.parquet.asks.named_adapters import rows_name_adapters
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import convert_inputs, remove_working_folders
from jobs.parquet.outputs.run_folder import (
    RunFolder,
    begin_folder,
    create_plan,
    find_plan,
    load_plan,
)
from jobs.parquet.planning.adapters import with_adapters_of_rows, with_named_adapters
from jobs.parquet.planning.find_files import FoundFile, find_files
from jobs.parquet.planning.inputs import check_as_planned, read_inputs
from jobs.parquet.planning.own_rows import in_order, remove_reused, with_reused
from jobs.runs.plans.names import PLAN, SUCCESS
from jobs.runs.plans.option_checks import check_served
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.shard_jobs import enqueue_shards
from jobs.runs.redis_state.state import RunState
from jobs.runs.redis_state.submission import Submission


def score_parquet(
    context: JobContext,
    input: str | list[str],
    output: str,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    template: str | list[dict[str, str]] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Plan a run and enqueue its shards. A second call with the same arguments resumes the run.

    Returns the run's id and counts. For the arguments, see RunSpec.from_arguments and Submission. queue: the queue for
    the shards; by default the queue of this job.
    Raises InvalidJob or RunError. Once shards are enqueued, only RunBusy may be raised.
    """
    queue = arguments.pop("queue", None)
    if queue is None:
        queue = context.queue_name
    submission, run_arguments = Submission.split(queue, arguments, context.created_at)
    run_arguments |= {
        "prompt_column": prompt_column,
        "messages_column": messages_column,
        "template": template,
    }
    spec = RunSpec.from_arguments(input, output, **run_arguments)
    spec.check_values(context.check_sampling)
    spec.prepare(context.checks)
    submission.check_calls(context.webhook_hosts, context.allowed_functions)
    return plan_run(context, Storage.of(context), spec, submission)


def plan_run(
    context: JobContext, storage: Storage, spec: RunSpec, submission: Submission
) -> dict[str, Any]:
    """Plan or resume the run of a checked spec. Raises RunError, or ModelNotServed for a new run."""
    storage.resolve(spec.output)  # raises PathOutsideRoots before anything is recorded
    queue = submission.queue
    state = RunState(context.connection, spec.run, context.lease)
    state.open_submission(context.job_id, spec.output, submission)
    found_files = find_files(storage, spec.input, spec.output, spec.input_format)
    plan = _agreed_plan(context, storage, found_files, spec, submission)
    folder = RunFolder(storage, plan, state, context.execution_id)
    had_ended = folder.has_success()
    missing = folder.missing_shards(context.check_interrupted)

    converted_bytes = 0
    if missing:
        # If a user has deleted _SUCCESS, the run counts as unfinished again.
        state.unmark_finished(folder.has_success)
        context.check_interrupted()
        files = {plan.shards[shard].file for shard in missing}
        converted_bytes = convert_inputs(storage, plan, files, context.execution_id)
        if converted_bytes and folder.has_success():  # workers have ended the run meanwhile
            remove_working_folders(storage, plan)
        folder.make_journal_folder()

    # Parts are counted before any shard runs. So the job of the last shard knows that it is the last.
    finished = folder.recount(queue)
    enqueued = 0
    if not finished:
        enqueued = enqueue_shards(context, queue, plan, state, missing)
    result = {
        "run": plan.run,
        "output": spec.output,
        "rows": plan.rows,
        "shards": len(plan.shards),
        "shards_missing": len(missing),
        "shards_enqueued": enqueued,
        "run_finished": finished,
        "already_finished": finished and had_ended,
    }
    if converted_bytes:
        result["input_bytes"] = converted_bytes
    if plan.reused and plan.reused.runs:
        result["reused"] = list(plan.reused.runs)
    return result


def _agreed_plan(
    context: JobContext,
    storage: Storage,
    found_files: Sequence[FoundFile],
    spec: RunSpec,
    submission: Submission,
) -> Plan:
    """Return the plan in the run's folder. If the folder has no plan, make a plan and write it.

    Raises OutputHoldsAnotherRun, RunOfAnotherModel or InputChanged if the folder's plan does not fit the submission.
    """
    plan = find_plan(storage, spec.output)
    if plan is None:
        new_plan = _new_plan(context, storage, found_files, spec, submission)
        if create_plan(storage, new_plan, context.execution_id):
            return new_plan

        # Another planner was first. Its plan counts, and the files of the new plan are removed.
        plan = load_plan(storage, os.path.join(spec.output, PLAN))
        remove_reused(storage, new_plan, plan_in_place=plan)
        if storage.stat(os.path.join(spec.output, SUCCESS)) is not None:
            # The run has ended meanwhile.
            remove_working_folders(storage, new_plan)

    if plan.run != spec.run:
        raise errors.OutputHoldsAnotherRun(
            spec.output, f"different {', '.join(plan.spec.differences(spec))}"
        )
    model_names = {plan.model.name, plan.model.fingerprint}
    if plan.model.fingerprint == context.model.fingerprint:
        model_names.update(context.model.names)
    if submission.model is not None and submission.model not in model_names:
        raise errors.RunOfAnotherModel(plan.run, str(plan.model), repr(submission.model))
    check_as_planned(storage, plan, found_files)
    return plan


def _new_plan(
    context: JobContext,
    storage: Storage,
    found_files: Sequence[FoundFile],
    spec: RunSpec,
    submission: Submission,
) -> Plan:
    """Return a plan for a run that has no plan yet. The caller writes the plan.

    If the run has an order, reuses answers, or has rows that name adapters, this function makes the run's folder. There
    it writes the converted input, the rows that the run chooses or sorts, and the answers taken from earlier runs.
    """
    if spec.only_new and not submission.reuse:
        raise errors.InvalidJob(
            "only_new leaves out what earlier runs have answered: name these runs with reuse"
        )
    plan = read_inputs(context, storage, spec, found_files)
    check_served(vars(spec), context.model)
    context.model.check_asked_for(submission.model)
    second = second_model(context, spec, submission.queue, plan.planned_at)
    plan = replace(plan, second=second)
    plan = with_named_adapters(context, plan)
    has_adapters = bool(context.adapters.names) and rows_name_adapters(spec)
    chooses_rows = spec.order is not None or bool(submission.reuse)
    if not chooses_rows and not has_adapters:
        return plan

    is_first = begin_folder(storage, spec.output)
    if not is_first:
        return plan  # another planner's plan is there already, so the caller discards this one
    files = {shard.file for shard in plan.shards if shard.rows}
    convert_inputs(storage, plan, files, context.execution_id)
    if has_adapters:
        plan = with_adapters_of_rows(context, storage, plan)
    plan = in_order(context, storage, plan)
    return with_reused(context, storage, plan, submission)


def second_model(context: JobContext, spec: RunSpec, queue: str, now: float) -> PinnedModel | None:
    """Return the model that answers rows with low margins again; None if the run is no cascade. Raises NoSecondModel.

    Workers of the queue must serve exactly one other model. The models are read from Redis keys that only workers can
    write. The records that people see are not used, because producers could forge them.
    """
    if spec.escalate_below is None:
        return None
    queue = spec.escalate_to or queue
    first_model = context.model
    candidates: set[PinnedModel] = set()
    for served in read_serving(context.connection, queue):
        names = served.models
        if not names or first_model.fingerprint in names:
            continue
        if spec.escalate_model and spec.escalate_model not in names:
            continue
        candidate = PinnedModel(
            name=served.model,
            fingerprint=names[0],  # ServedModel.names begins with the fingerprint
            dtype=served.dtype,
            max_model_len=served.max_model_len,
            clock=clock_text(split_formats(served.clock_formats), now),
        )
        candidates.add(candidate)

    if len(candidates) != 1:
        served_models = ", ".join(sorted(map(str, candidates))) or "none"
        raise errors.NoSecondModel(queue, served_models, str(first_model))
    return candidates.pop()
