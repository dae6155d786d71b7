"""What a new run takes from earlier ones: answers beside its plan, or the rows that none of them has answered."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.context import JobContext
from jobs.errors import InvalidJob
from jobs.parquet.asks.ask import Ask
from jobs.parquet.asks.kinds import ask_of
from jobs.parquet.asks.row_keys import SIZE, Keys, model_mark, row_keys
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import convert_inputs
from jobs.parquet.outputs.part import answer_fields, embedding_size
from jobs.parquet.outputs.plan_file import begin_folder
from jobs.parquet.prompts.prompt_source import RowSource
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.known_keys import Places
from jobs.parquet.reuse.new_rows import only_rows
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.reuse.taken_answers import TakenAnswers
from jobs.parquet.shards.shard_texts import rendered_shards
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
    if not begin_folder(storage, spec.output):
        return plan
    old = OldRuns(storage, submission.reuse)
    seed = plan.seed if old.seed is None or "seed" in spec.sampling else old.seed
    reused = Reused(context.execution_id)
    plan = replace(plan, seed=seed, reused=reused)
    files = {shard.file for shard in plan.shards if shard.rows}
    convert_inputs(storage, plan, files, context.execution_id, context.shard_bytes.limit)
    source = row_source(spec, context.check_sampling)
    asks = ask_of(plan, source, context), source
    matches = match(context, storage, plan, asks, old, submission.reuse_from_any_model)
    if spec.only_new:
        for _ in answers(old, matches, pa.schema([pa.field("error", pa.string())])):
            pass  # it leaves of matches those that have no error, and can be read
        plan = only_rows(storage, plan, plan, matches.places < 0)
    else:
        fields = answer_fields(replace(spec, reused_column=None), embedding_size(spec, context.model))
        take(storage, plan, pa.schema(fields), old, matches)
    runs = tuple(map(asdict, old.told))
    return replace(plan, reused=Reused(reused.name, asks[0].keys.name, submission.reuse_from_any_model, runs))


@dataclass
class Matches:
    """Of each row of a new run the place of the old row with its answer, -1 for none, and which of `marks` that has."""

    places: Places
    models: npt.NDArray[np.uint16]
    marks: Keys


def match(
    context: JobContext, storage: Storage, plan: Plan, asks: tuple[Ask, RowSource], old: OldRuns, any_model: bool
) -> Matches:
    """Look up each row of a plan, whose inputs can be read. asks: what is asked, of which rows. Raises InputError."""
    ask, source = asks
    marks = model_mark(context.model.fingerprint)
    if any_model:
        marks = np.concatenate([marks, old.marks])  # its own answers first
    found = Matches(np.full(plan.rows, -1, np.int64), np.zeros(plan.rows, np.uint16), marks)
    repeated = np.array(plan.repeated, np.int64)  # ascending
    for start, rows in rendered_shards(context, storage, plan, source):
        places, models = found.places[start : start + len(rows)], found.models[start : start + len(rows)]
        keys = row_keys(ask.key_of, rows)
        asked: npt.NDArray[np.bool_] = np.any(keys, axis=1)
        first, end = np.searchsorted(repeated, [start, start + len(rows)])
        asked[repeated[first:end] - start] = False
        for number, mark in enumerate(marks):
            missing = np.flatnonzero(asked & (places < 0))
            places[missing] = old.keys.find(keys[missing] ^ mark)
            models[missing] = number
    return found


def answers(
    old: OldRuns, matches: Matches, schema: pa.Schema
) -> Iterator[tuple[npt.NDArray[np.int64], pa.RecordBatch, list[str]]]:
    """Yield the answers of matches, by the names of `schema`: the new rows that have them, and which old rows they are.

    Where all were yielded, what has an error or could not be read is no match any more, and `old` counts the others.
    """
    rows = np.flatnonzero(matches.places >= 0)
    rows = rows[np.argsort(matches.places[rows], kind="stable")]
    is_good = np.zeros(len(rows), bool)
    for part, which, batch in old.answers(matches.places[rows], schema):
        is_good[which] = True
        part.told.rows += len(which)
        first = part.plan.first_row(part.shard) - part.first
        yield rows[which], batch, [f"{part.told.output}#{place + first}" for place in matches.places[rows[which]]]
    matches.places[rows[~is_good]] = -1


def take(storage: Storage, plan: Plan, schema: pa.Schema, old: OldRuns, matches: Matches) -> None:
    """Copy the answers of matches beside the plan. schema: of the answers, by their own names.

    Raises DiskFull or OutputNotWritable.
    """
    with TakenAnswers(storage, plan, schema) as taken:
        for rows, batch, sources in answers(old, matches, schema):
            marks = [matches.marks[number].tobytes() for number in matches.models[rows]]
            taken.add(rows, batch, pa.array(marks, pa.binary(SIZE)), pa.array(sources, pa.string()))
        taken.write()
