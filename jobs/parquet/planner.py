"""Plans a run, or resumes one: what `jobs.score_parquet` does inside a worker."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from ..common.shown import shown
from ..common.version import code_version
from ..context import JobContext
from ..context.served_model import ServedModel, parse_model
from ..errors import (
    InputChanged,
    InvalidValue,
    MissingColumn,
    OutputHoldsAnotherRun,
    RunOfAnotherModel,
)
from ..runs.embedding_options import check_served
from ..runs.end_calls import NO_CALLS, EndCalls
from ..runs.error_limit import DEFAULT_LIMIT, ErrorLimit
from ..runs.names import PLAN
from ..runs.plan import PinnedModel, Plan, PlannedFile, cut_shards
from ..runs.run_index import list_in_index
from ..runs.shard_jobs import enqueue_shards
from ..runs.spec import RunSpec, check_queue_name
from ..runs.state import RunState
from .find_files import find_files
from .inputs import Inputs, read_inputs
from .part import embedding_size, output_schema, part_stats, write_part
from .run_folder import RunFolder, create_plan, load_plan
from .shard_labels import content_free
from .shard_lengths import shard_lengths
from .sources import read_source
from .storage import Storage, writing


def score_parquet(
    context: JobContext,
    input: str | list[str],
    output: str,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    template: str | list[dict[str, str]] | None = None,
    sampling: dict[str, Any] | None = None,
    rows_per_shard: int = 1000,
    queue: str | None = None,
    model: str | None = None,
    filename_column: str | None = None,
    redo_damaged: bool = False,
    max_errors: int | str | None = None,
    webhook: str | None = None,
    on_end: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Plan a run and enqueue its shards; called again with the same arguments, resume it.

    input: a file, a folder, a glob, or a list of them, below the worker's data roots. Folders named
    key=value below it are read too, and give columns.
    output: a new or empty folder, or that of the same run.
    prompt_column: text that is completed as it stands. messages_column instead: chats, as lists of structs
    with role and content or as their JSON. template instead: a text with {column} fields, completed as it
    stands, or a list of {'role', 'content'} with such texts, which makes a chat.
    sampling: keyword arguments of engine.SamplingParams; `seed` fixes the run's seed.
    queue: for the shards; by default the queue this job came from.
    model: by a name of it; the run is that of the model served here, and another name is refused.
    filename_column: adds a column of this name with each row's file.
    redo_damaged: removes parts that are not what this run has written, and computes their rows again.
    max_errors: the run is stopped, as if it was cancelled, when more finished rows have an error: a number of
    rows, or a share like "5%", from the hundredth row on; by default "90%".
    webhook, on_end: a URL that is called, and a function, at the run's end, see jobs.runs.told_end.
    options: see RunSpec.from_arguments.
    Returns the run's id and counts. Raises RunError or InvalidJob, before any shard is enqueued unless it is
    RunBusy: another process took the run over.
    """
    prompt = (prompt_column, messages_column, template)
    spec = RunSpec.from_arguments(
        input, output, *prompt, sampling, rows_per_shard, filename_column, **options
    )
    if not isinstance(redo_damaged, bool):
        raise InvalidValue(
            "redo_damaged is {}, expected true or false: write redo_damaged:=true", shown(redo_damaged)
        )
    if queue is not None:
        check_queue_name(queue)
    spec.check_sampling(context.check_sampling)
    check_served(spec.task, spec.dimensions, spec.prompt_name, context.model, spec.rows_per_shard)
    context.checks.prepare(spec.repairs)
    limit, calls = ErrorLimit.parse(max_errors), EndCalls.parse(webhook, on_end)
    calls.check_allowed(context.webhook_hosts, context.allowed_functions)
    submission = Submission(queue or context.queue_name, parse_model(model), redo_damaged, limit, calls)
    return plan_run(context, Storage.of(context), spec, submission)


@dataclass(frozen=True)
class Submission:
    """What one submission of a run says beside the run's arguments. See score_parquet."""

    queue: str
    model: str | None = None
    redo_damaged: bool = False
    limit: ErrorLimit = DEFAULT_LIMIT
    calls: EndCalls = NO_CALLS


def plan_run(context: JobContext, storage: Storage, spec: RunSpec, submission: Submission) -> dict[str, Any]:
    """Plan or resume the run of a checked spec. Raises RunError, or ModelNotServed for a new run."""
    storage.resolve(spec.output)
    state, queue = RunState(context.connection, spec.run, context.lease), submission.queue
    state.open_submission(
        context.job_id, spec.output, queue, submission.model, submission.limit, submission.calls
    )
    list_in_index(context.connection, spec.run)
    found = find_files(storage, spec.input, spec.output, spec.input_format)
    limit = context.shard_bytes.limit
    inputs = read_inputs(
        storage, found, spec.filename_column, context.check_interrupted, limit, spec.limit, spec.input_format
    )
    check_columns(spec, inputs.schema, found[0].path)
    plan = _agreed_plan(context, storage, spec, inputs, submission.model)
    folder = RunFolder(storage, plan, state, context.execution_id)
    if plan.rows == 0:
        _publish_empty_part(folder, inputs, context.model)
    had_ended = folder.has_success() or state.end().finished
    damaged = _check_parts(folder, submission.redo_damaged, context.check_interrupted)
    missing = folder.withdraw_end(damaged)
    context.check_interrupted()
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
    }


def check_columns(spec: RunSpec, schema: pa.Schema, path: str) -> None:
    """Raise MissingColumn, WrongColumnType or ColumnConflict for columns that the run cannot be made of.

    schema: the added columns included. path: of one of the files, for the error.
    """
    source = read_source(spec)
    if spec.calibrate:
        content_free(source)  # raises once, and not in every shard
    for column in source.columns:
        if column not in schema.names:
            raise MissingColumn(column, path, ", ".join(map(repr, schema.names)))
    source.check(schema)
    output_schema(schema, spec, path)


def _check_parts(folder: RunFolder, redo: bool, check_interrupted: Callable[[], None]) -> set[int]:
    """Look into every part that is there; raise PartDamaged for one that this run has not written so.

    redo: return such parts' shards instead, whose jobs will replace them. Either way the run has not finished
    any more.
    """
    recorded = folder.state.records()
    found = folder.damaged_parts(check_interrupted)
    if redo:
        folder.delete_surplus(found)
        return found.keys() & set(range(len(folder.plan.shards)))
    if found:
        folder.withdraw_end(found.keys())
        gone = {shard: record for shard, record in recorded.items() if shard in found}
        folder.state.amend_parts({}, gone, len(folder.plan.shards))
        raise next(iter(found.values()))
    return set()


def _agreed_plan(
    context: JobContext, storage: Storage, spec: RunSpec, inputs: Inputs, model: str | None
) -> Plan:
    """Return the plan on disk, or write a new one; of two planners at once both return the first one's.

    model: the one that is asked for, if any; a plan on disk is resumed whichever model is served here.
    """
    path = os.path.join(spec.output, PLAN)
    with writing(path):
        is_new = storage.stat(path) is None
    if is_new:
        context.model.check_asked_for(model)
        plan = _with_sizes(context, storage, new_plan(context, spec, inputs), inputs)
        if create_plan(storage, plan, context.execution_id):
            return plan
    plan = load_plan(storage, path)
    if plan.run != spec.run:
        raise OutputHoldsAnotherRun(spec.output, f"different {', '.join(plan.spec.differences(spec))}")
    _check_same_model(plan, context.model, model)
    _check_same_files(storage, plan, inputs)
    return plan


def _with_sizes(context: JobContext, storage: Storage, plan: Plan, inputs: Inputs) -> Plan:
    return replace(plan, sizes=shard_lengths(context, storage, plan, inputs, read_source(plan.spec)))


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


def _check_same_files(storage: Storage, plan: Plan, inputs: Inputs) -> None:
    """Raise InputChanged for the first file that is not as planned."""
    planned = {file.path: file for file in plan.files}
    found = {file.path: file for file in inputs.files}
    for path in [*found, *planned]:
        if path not in planned:
            raise InputChanged(path, "it is new")
        if path not in found:
            raise InputChanged(path, storage.what_is_there(path))
        if planned[path] != found[path]:
            raise InputChanged(path, _difference(planned[path], found[path]))
    if list(planned) != list(found):
        raise InputChanged(plan.spec.input[0], "its files come in another order")


def _difference(planned: PlannedFile, found: PlannedFile) -> str:
    for name in ("size", "rows", "values"):
        if getattr(planned, name) != getattr(found, name):
            return f"{name}: planned {getattr(planned, name)}, found {getattr(found, name)}"
    return f"it has the same {found.size} bytes, but other contents"


def _publish_empty_part(folder: RunFolder, inputs: Inputs, model: ServedModel) -> None:
    """Publish the one part of a run without rows, so that readers find the schema."""
    now = time.time()
    stats = part_stats(folder.plan.run, 0, [], generated_tokens=0, started_at=now, ended_at=now, model=model)
    temporary, spec = folder.temporary_part(0), folder.plan.spec
    schema = output_schema(inputs.schema, spec, embedding_size=embedding_size(spec, model))
    folder.make_parts_folder()
    try:
        write_part(folder.storage, temporary, schema, [], stats)
        folder.publish(temporary, 0)
    finally:
        folder.storage.delete(temporary)
