"""What a new run takes from earlier ones: answers beside its plan, or the rows that none of them has answered."""

from dataclasses import asdict, replace

import pyarrow as pa

from jobs.context import JobContext
from jobs.errors import InvalidJob
from jobs.parquet.asks.kinds import ask_of
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.formats.converted_inputs import convert_inputs
from jobs.parquet.outputs.part import answer_fields, embedding_size
from jobs.parquet.outputs.plan_file import check_no_others
from jobs.parquet.planning.matching import keep_answered, match, take
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.new_rows import only_rows
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.runs.plans.plan import Plan, Reused
from jobs.runs.redis_state.end_calls import Submission


def with_reused(context: JobContext, storage: Storage, plan: Plan, submission: Submission) -> Plan:
    """Take what the runs that a submission names have answered; return the plan that says so.

    Its seed is the first one's, unless its arguments have one: rows that are asked again, and have not moved, keep
    their own. Raises CannotReuse, InvalidJob, InputError or OutputError.
    """
    spec = plan.spec
    if not submission.reuse:
        if spec.only_new:
            raise InvalidJob("only_new leaves out what earlier runs have answered: name these with reuse")
        return plan
    with writing(spec.output):
        storage.make_folder(spec.output)
        check_no_others(spec.output, storage.names(spec.output))
    old = OldRuns(storage, submission.reuse)
    seed = plan.seed if old.seed is None or "seed" in spec.sampling else old.seed
    plan = replace(plan, seed=seed, reused=Reused(context.execution_id))
    files = {shard.file for shard in plan.shards if shard.rows}
    convert_inputs(storage, plan, files, context.execution_id, context.shard_bytes.limit)
    source = row_source(spec, context.check_sampling)
    asks = ask_of(plan, source, context), source
    matches = match(context, storage, plan, asks, old, submission.reuse_from_any_model)
    if spec.only_new:
        keep_answered(old, matches)
        plan = only_rows(storage, plan, plan, matches.places < 0)
    else:
        fields = answer_fields(replace(spec, reused_column=None), embedding_size(spec, context.model))
        take(storage, plan, pa.schema(fields), old, matches)
    return replace(plan, reused=Reused(context.execution_id, tuple(map(asdict, old.told))))
