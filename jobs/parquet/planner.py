"""Plans a run, or resumes one: what `jobs.score_parquet` does inside a worker."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from ..context import JobContext
from ..errors import (
    InputChanged,
    InvalidJob,
    MissingColumn,
    OutputHoldsAnotherRun,
    RunCancelled,
    RunOfAnotherModel,
)
from ..run_state import RunState
from ..served_model import ServedModel, parse_model
from ..shown import shown
from ..version import code_version
from .enqueue import enqueue_shards
from .inputs import Footer, find_files, read_footers
from .names import PLAN, part_name
from .part import output_schema, part_stats, write_part
from .plan import PinnedModel, Plan, cut_shards
from .prompt_source import prompt_source
from .run_folder import RunFolder, create_plan, load_plan
from .spec import MAX_NAME_CHARS, RunSpec
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
) -> dict[str, Any]:
    """Plan a run and enqueue its shards; called again with the same arguments, resume it.

    input: a Parquet file, a folder, a glob, or a list of them, below the worker's data roots.
    output: a new or empty folder, or that of the same run.
    prompt_column: text that is completed as it stands. messages_column instead: chats, as lists of structs
    with role and content or as their JSON. template instead: a text with {column} fields, completed as it
    stands, or a list of {'role', 'content'} with such texts, which makes a chat.
    sampling: keyword arguments of engine.SamplingParams; `seed` fixes the run's seed.
    queue: for the shards; by default the queue this job came from.
    model: by a name of it; the run is that of the model served here, and another name is refused.
    Returns the run's id and counts. Raises RunError or InvalidJob, before any shard is enqueued unless it is
    RunBusy: another process took the run over.
    """
    spec = RunSpec.from_arguments(
        input, output, prompt_column, messages_column, template, sampling, rows_per_shard
    )
    if queue is not None and (not isinstance(queue, str) or not 0 < len(queue) <= MAX_NAME_CHARS):
        raise InvalidJob(
            f"queue is {shown(queue)}, expected the name of a queue, at most {MAX_NAME_CHARS} characters"
        )
    context.check_sampling(spec.sampling)
    return plan_run(
        context, Storage(context.data_roots), spec, queue or context.queue_name, parse_model(model)
    )


def plan_run(
    context: JobContext, storage: Storage, spec: RunSpec, queue: str, model: str | None = None
) -> dict[str, Any]:
    """Plan or resume the run of a checked spec. Raises RunError, or ModelNotServed for a new run."""
    storage.resolve(spec.output)
    state = RunState(context.connection, spec.run)
    _open_submission(state, context.job_id, spec.output, queue, model)
    footers = read_footers(storage, find_files(storage, spec.input, spec.output), context.check_interrupted)
    _check_columns(spec, footers[0])
    plan = _agreed_plan(context, storage, spec, footers, model)
    folder = RunFolder(storage, plan, state, context.execution_id)
    if plan.rows == 0:
        _publish_empty_part(folder, footers[0], context.model)
    # Looked for first: the mark of a run that ends while this planner is frozen stays.
    had_ended = folder.has_success()
    missing = sorted(set(range(len(plan.shards))) - folder.shards_with_parts())
    if missing and had_ended:
        folder.withdraw_success()
    context.check_interrupted()
    finished = folder.recount(queue)  # before any shard runs: from here on the last one knows that it is
    enqueued = 0 if finished else enqueue_shards(context, queue, folder, missing)
    return {
        "run": plan.run,
        "output": spec.output,
        "rows": plan.rows,
        "shards": len(plan.shards),
        "shards_missing": len(missing),
        "shards_enqueued": enqueued,
        "run_finished": finished,
    }


def _open_submission(state: RunState, job_id: str, output: str, queue: str, model: str | None) -> None:
    """Tell Redis of the run. Raises RunCancelled when this job was cancelled, and runs again because its
    worker died: that is no new submission."""
    if not state.was_submitted_by(job_id):
        state.submit(job_id, output, queue, model)
        return
    try:
        state.check_not_cancelled()
    except RunCancelled:
        state.forget_submission()
        raise


def _check_columns(spec: RunSpec, first: Footer) -> None:
    source = prompt_source(spec)
    for column in source.columns:
        if column not in first.schema.names:
            raise MissingColumn(column, first.file.path, ", ".join(map(repr, first.schema.names)))
    source.check(first.schema)
    output_schema(first.schema)


def _agreed_plan(
    context: JobContext, storage: Storage, spec: RunSpec, footers: list[Footer], model: str | None
) -> Plan:
    """Return the plan on disk, or write a new one; of two planners at once both return the first one's.

    model: the one that is asked for, if any; a plan on disk is resumed whichever model is served here.
    """
    path = os.path.join(spec.output, PLAN)
    with writing(path):
        is_new = storage.stat(path) is None
    if is_new:
        context.model.check_asked_for(model)
        plan = _new_plan(context, spec, footers)
        if create_plan(storage, plan, context.execution_id):
            return plan
    plan = load_plan(storage, path)
    if plan.run != spec.run:
        raise OutputHoldsAnotherRun(spec.output, f"different {', '.join(plan.spec.differences(spec))}")
    _check_same_model(plan, context.model, model)
    _check_same_files(plan, footers)
    return plan


def _new_plan(context: JobContext, spec: RunSpec, footers: list[Footer]) -> Plan:
    seed = spec.sampling.get("seed")
    return Plan(
        spec=spec,
        seed=secrets.randbits(63) if seed is None else seed,
        model=PinnedModel(context.model.name, context.model.fingerprint, context.model.dtype),
        version=code_version(),
        files=tuple(footer.file for footer in footers),
        shards=cut_shards([footer.row_groups for footer in footers], spec.rows_per_shard),
    )


def _check_same_model(plan: Plan, served: ServedModel, asked_for: str | None) -> None:
    """Raise RunOfAnotherModel when the plan's model has not the name that is asked for."""
    names = {plan.model.name, plan.model.fingerprint}
    if plan.model.fingerprint == served.fingerprint:
        names.update(served.names)
    if asked_for is not None and asked_for not in names:
        raise RunOfAnotherModel(plan.run, str(plan.model), repr(asked_for))


def _check_same_files(plan: Plan, footers: list[Footer]) -> None:
    """Raise InputChanged for the first file that is not as planned."""
    planned = {file.path: file for file in plan.files}
    found = {footer.file.path: footer.file for footer in footers}
    for path in [*found, *planned]:
        if path not in planned:
            raise InputChanged(path, "it is new")
        if path not in found:
            raise InputChanged(path, "it is gone")
        if planned[path] != found[path]:
            raise InputChanged(path, f"planned {planned[path]}, found {found[path]}")
    if list(planned) != list(found):
        raise InputChanged(plan.spec.input[0], "its files come in another order")


def _publish_empty_part(folder: RunFolder, first: Footer, model: ServedModel) -> None:
    """Publish the one part of a run without rows, so that readers find the schema."""
    now = time.time()
    stats = part_stats(folder.plan.run, 0, [], generated_tokens=0, started_at=now, ended_at=now, model=model)
    temporary = folder.temporary_path(part_name(0))
    try:
        write_part(folder.storage, temporary, output_schema(first.schema), [], stats)
        folder.publish(temporary, part_name(0))
    finally:
        folder.storage.delete(temporary)
