"""Has the rows of a run that failed asked again: what `jobs.retry_rows` does inside a worker."""

from typing import Any

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.errors import InvalidJob, InvalidValue
from jobs.parquet.files.fingerprint import unchanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import convert_inputs
from jobs.parquet.outputs.plan_file import remove_extensions
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.shards.rows_task import check_model, trusted_plan
from jobs.runs.plans.formats import OPENAI_BATCH
from jobs.runs.plans.names import is_run_id
from jobs.runs.redis_state.end_calls import ErrorLimit, Submission
from jobs.runs.redis_state.shard_jobs import enqueue_shards
from jobs.runs.redis_state.state import RunState

#: None is ever passed: rows that fail again leave the run as it was, and it ends.
NO_LIMIT = ErrorLimit(share=1.0)


def retry_rows(context: JobContext, run: str, plan: str) -> dict[str, Any]:
    """Enqueue the shards of a run, by its plan's path, to ask rows with an error again; return the run's id and counts.

    What is refused changes nothing. Raises RunError or InvalidJob.
    """
    if not is_run_id(run) or not isinstance(plan, str):
        raise InvalidValue("run is {}, expected a planned run's id, and its plan's path", brief(run))
    storage = Storage.of(context)
    remove_extensions(storage, trusted_plan(context, storage, plan, run).spec.output)
    found = trusted_plan(context, storage, plan, run)
    spec = found.spec
    if found.input_format == OPENAI_BATCH:
        raise InvalidJob(f"run {run} is of jobs of their own: submit the lines of errors.jsonl as a file instead")
    check_model(found, context.model)
    spec.check_sampling(context.check_sampling)
    context.checks.prepare(spec.repairs)
    state = RunState(context.connection, run, context.lease)
    folder = RunFolder(storage, found, state, context.execution_id)
    failed, rows = [], 0
    for shard in sorted(folder.shards_with_parts()):
        context.check_interrupted()
        if errors := folder.part_stats(shard).errors:
            failed.append(shard)
            rows += errors
    _prepare_inputs(context, storage, folder, failed)
    state.open_submission(context.job_id, spec.output, Submission(context.queue_name, limit=NO_LIMIT))
    finished = folder.recount(context.queue_name)
    missing = folder.missing_shards()
    enqueued = 0
    if failed:
        folder.withdraw_end(anyway=True)
        records = state.records()
        gone = {shard: records[shard] for shard in failed if shard in records}
        state.amend_parts({}, gone, len(found.shards))
        state.count_anew()
        enqueued = enqueue_shards(context, context.queue_name, found, state, failed, {"retry_errors": True})
    if missing:
        enqueued += enqueue_shards(context, context.queue_name, found, state, missing)
    return {
        "run": run,
        "output": spec.output,
        "rows": found.rows,
        "shards": len(found.shards),
        "rows_to_retry": rows,
        "shards_enqueued": enqueued,
        "run_finished": finished and not failed,
    }


def _prepare_inputs(context: JobContext, storage: Storage, folder: RunFolder, shards: list[int]) -> None:
    """Raise InputChanged before anything is taken back: no shard could read its rows."""
    plan = folder.plan
    files = sorted({plan.shards[shard].file for shard in shards})
    convert_inputs(storage, plan, files, context.execution_id, context.shard_bytes.limit)
    for number in files:
        with unchanged(storage, plan, plan.files[number]):
            pass
