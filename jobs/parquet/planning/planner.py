"""Plans a run, or resumes one: what `jobs.score_parquet` does inside a worker."""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from jobs.common.display import brief
from jobs.common.version import code_version
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import MissingColumn, OutputHoldsAnotherRun, RunBusy, RunOfAnotherModel
from jobs.parquet.asks.labels import content_free
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import convert_inputs
from jobs.parquet.outputs.part import embedding_size, output_schema, part_stats, write_part
from jobs.parquet.outputs.plan_file import create_plan, find_plan, load_plan, replace_plan
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.planning.find_files import find_files
from jobs.parquet.planning.grown_plan import (
    begins_as_planned,
    by_planned_file,
    check_as_planned,
    extended,
    in_planned_order,
)
from jobs.parquet.planning.inputs import Inputs, read_inputs
from jobs.parquet.planning.shard_lengths import shard_lengths
from jobs.parquet.prompts.sources import row_source
from jobs.runs.plans.embedding_options import check_served
from jobs.runs.plans.names import PLAN, plan_job_id
from jobs.runs.plans.plan import PinnedModel, Plan, cut_shards
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.end_calls import Submission
from jobs.runs.redis_state.run_index import list_in_index
from jobs.runs.redis_state.shard_jobs import enqueue_shards
from jobs.runs.redis_state.state import RunState
from jobs.runs.refusals import CannotExtend


def score_parquet(
    context: JobContext,
    input: str | list[str],
    output: str,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    template: str | list[dict[str, str]] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Plan a run and enqueue its shards; called again with the same arguments, resume it.

    input to template, and others that say what is asked: see RunSpec.from_arguments.
    queue: for the shards; by default the queue this job came from. model, redo_damaged, extend: see Submission.
    webhook, on_end: a URL that is called, and a function, at the run's end.
    max_errors: the run is stopped, as if it was cancelled, when more finished rows have an error: a number of rows, or
    a share like "5%", from the hundredth row on; by default "90%". All rows may fail with "100%" alone.
    Returns the run's id and counts. Raises RunError or InvalidJob, before any shard is enqueued unless it is RunBusy:
    another process took the run over.
    """
    queue = arguments.pop("queue", None)
    submission, own = Submission.split(context.queue_name if queue is None else queue, arguments)
    prompt = {"prompt_column": prompt_column, "messages_column": messages_column, "template": template}
    spec = RunSpec.from_arguments(input, output, **prompt, **own)
    submission.check_with(spec)
    spec.check_sampling(context.check_sampling)
    context.checks.prepare(spec.repairs)
    submission.calls.check_allowed(context.webhook_hosts, context.allowed_functions)
    return plan_run(context, Storage.of(context), spec, submission)


def plan_run(context: JobContext, storage: Storage, spec: RunSpec, submission: Submission) -> dict[str, Any]:
    """Plan or resume the run of a checked spec. Raises RunError, or ModelNotServed for a new run."""
    storage.resolve(spec.output)
    asked = spec.input
    if submission.extend:
        spec = _spec_to_extend(context, storage, spec)
    state, queue = RunState(context.connection, spec.run, context.lease), submission.queue
    state.open_submission(context.job_id, spec.output, submission)
    list_in_index(context.connection, spec.run)
    found = find_files(storage, asked, spec.output, spec.input_format)
    before = find_plan(storage, spec.output)
    if before is not None:
        _check_is_of(before, spec)
    if before is not None and not submission.extend and before.input != asked:
        found = find_files(storage, before.input, spec.output, spec.input_format)
    if before is not None and (submission.extend or before.extensions):
        found = in_planned_order(found, before)
    inputs = read_inputs(context, storage, spec, found, before)
    check_columns(spec, inputs.schema, found[0].path)
    known = plan = _agreed_plan(context, storage, spec, inputs, submission.model, before)
    if submission.extend:
        plan = _extended(context, storage, known, inputs, asked, state)
    else:
        check_as_planned(storage, plan, inputs)
    folder = RunFolder(storage, plan, state, context.execution_id)
    if plan.rows == 0:
        _publish_empty_part(folder, inputs, context.model)
    had_ended = folder.has_success() or state.end().finished
    damaged = _check_parts(folder, submission.redo_damaged, context.check_interrupted)
    missing = folder.withdraw_end(damaged, anyway=plan is not known)
    context.check_interrupted()
    asked_of = {plan.shards[shard].file for shard in missing if plan.shards[shard].rows}
    limit = context.shard_bytes.limit
    num_bytes = convert_inputs(storage, plan, asked_of, context.execution_id, limit)
    if missing:
        folder.make_journal_folder()
    finished = folder.recount(queue, damaged)  # before any shard runs: from here on the last one knows it is
    how = {"redo_damaged": True} if damaged else {}
    enqueued = 0 if finished else enqueue_shards(context, queue, plan, state, missing, how)
    return {
        "run": plan.run,
        "output": spec.output,
        "rows": plan.rows,
        "shards": len(plan.shards),
        "shards_missing": len(missing),
        "shards_enqueued": enqueued,
        "run_finished": finished,
        "already_finished": finished and had_ended,
        **({"input_bytes": num_bytes} if num_bytes else {}),
        **({"rows_added": plan.rows - known.rows} if submission.extend else {}),
    }


def check_columns(spec: RunSpec, schema: pa.Schema, path: str) -> None:
    """Raise MissingColumn, WrongColumnType or ColumnConflict for columns, added ones included, that make no run."""
    source = row_source(spec)
    if spec.calibrate:
        content_free(spec, source)  # raises once, and not in every shard
    for column in source.columns:
        if column not in schema.names:
            raise MissingColumn(column, path, ", ".join(map(repr, schema.names)))
    source.check(schema)
    output_schema(schema, spec, path)


def _check_parts(folder: RunFolder, redo: bool, check_interrupted: Callable[[], None]) -> set[int]:
    """Raise PartDamaged, and take the end back, for a part that this run has not written so; `redo` returns such
    shards."""
    recorded = folder.state.records()
    found = folder.damaged_parts(check_interrupted)
    if redo or (found.keys() == {0} and folder.has_empty_part()):
        folder.delete_surplus(found)
        return found.keys() & set(range(len(folder.plan.shards)))
    if found:
        folder.withdraw_end(found.keys())
        gone = {shard: record for shard, record in recorded.items() if shard in found}
        folder.state.amend_parts({}, gone, len(folder.plan.shards))
        folder.state.count_anew()
        raise next(iter(found.values()))
    return set()


def _spec_to_extend(context: JobContext, storage: Storage, spec: RunSpec) -> RunSpec:
    """Return the arguments of the run in the folder, whatever input they name; those given where none is."""
    plan = find_plan(storage, spec.output)
    if plan is None or plan.run == spec.run:
        return spec
    if differences := [name for name in plan.spec.differences(spec) if name != "input"]:
        raise OutputHoldsAnotherRun(spec.output, f"different {', '.join(differences)}")
    if context.job_id == plan_job_id(spec.run):  # whoever submitted it waits for a run of another id
        raise CannotExtend(
            spec.output,
            f"it holds run {plan.run}, of which this Redis knows nothing",
            f"submit it first as it was before (input {brief(plan.input)}), which resumes it",
        )
    return plan.spec


def _check_is_of(plan: Plan, spec: RunSpec) -> None:
    if plan.run != spec.run:
        raise OutputHoldsAnotherRun(spec.output, f"different {', '.join(plan.spec.differences(spec))}")


def _agreed_plan(
    context: JobContext, storage: Storage, spec: RunSpec, inputs: Inputs, model: str | None, before: Plan | None
) -> Plan:
    """Return the plan on disk, or write a new one. model: that is asked for. before: the plan there was."""
    plan = before
    if plan is None or plan.model.fingerprint == context.model.fingerprint:  # else another worker does it
        check_served(spec.task, spec.dimensions, spec.prompt_name, context.model, spec.rows_per_shard)
    if plan is None:
        context.model.check_asked_for(model)
        plan = _with_sizes(context, storage, new_plan(context, spec, inputs), inputs)
        if create_plan(storage, plan, context.execution_id):
            return plan
        plan = load_plan(storage, os.path.join(spec.output, PLAN))
        _check_is_of(plan, spec)
    _check_same_model(plan, context.model, model)
    return plan


def _extended(
    context: JobContext, storage: Storage, plan: Plan, inputs: Inputs, asked: list[str], state: RunState
) -> Plan:
    """Return the plan with what the input has gained, written over the old one. asked: the input's names."""
    longer = extended(plan, inputs, asked, partial(begins_as_planned, storage), time.time())
    if longer is None:
        return plan
    longer = _with_sizes(context, storage, longer, by_planned_file(longer, inputs))
    if not replace_plan(storage, longer, plan, context.execution_id, state.check_held):
        raise RunBusy(plan.run)  # who extends it now
    return longer


def _with_sizes(context: JobContext, storage: Storage, plan: Plan, inputs: Inputs) -> Plan:
    return replace(plan, sizes=shard_lengths(context, storage, plan, inputs, row_source(plan.spec)))


def new_plan(context: JobContext, spec: RunSpec, inputs: Inputs) -> Plan:
    """Return the plan of a run that has none yet."""
    seed = spec.sampling.get("seed")
    return Plan(
        spec=spec,
        seed=secrets.randbits(63) if seed is None else seed,
        model=PinnedModel(context.model.name, context.model.fingerprint, context.model.dtype),
        version=code_version(),
        files=inputs.files,
        shards=cut_shards(inputs.row_groups, spec.rows_per_shard, spec.limit),
        added_columns=inputs.added_columns,
        input_format=inputs.input_format,
        columns=inputs.columns,
        repeated=inputs.repeated,
    )


def _check_same_model(plan: Plan, served: ServedModel, asked_for: str | None) -> None:
    """Raise RunOfAnotherModel when the plan's model has not the name that is asked for."""
    names = {plan.model.name, plan.model.fingerprint}
    if plan.model.fingerprint == served.fingerprint:
        names.update(served.names)
    if asked_for is not None and asked_for not in names:
        raise RunOfAnotherModel(plan.run, str(plan.model), repr(asked_for))


def _publish_empty_part(folder: RunFolder, inputs: Inputs, model: ServedModel) -> None:
    """Publish the one part of a run without rows, so that readers find the schema."""
    now = time.time()
    stats = part_stats(folder.plan.run, 0, [], generated_tokens=0, times=(now, now), model=model)
    temporary, spec = folder.temporary_part(0), folder.plan.spec
    schema = output_schema(inputs.schema, spec, embedding_size=embedding_size(spec, model))
    folder.make_parts_folder()
    try:
        write_part(folder.storage, temporary, schema, [], stats)
        folder.publish(temporary, 0)
    finally:
        folder.storage.remove(temporary)
