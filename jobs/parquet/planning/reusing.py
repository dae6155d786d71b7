"""What a new run takes from earlier ones: answers beside its plan, or the rows that none of them has answered."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.context import JobContext
from jobs.parquet.asks.ask import Ask
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.asks.row_keys import SIZE, Keys, model_mark, row_keys
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.outputs.part import embedding_size
from jobs.parquet.planning.own_rows import with_own_rows
from jobs.parquet.reuse.known_keys import Places
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.reuse.taken_answers import BESIDE, write_taken
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.row_groups import RowBuckets
from jobs.runs.plans.names import kept_name
from jobs.runs.plans.plan import Plan, Reused
from jobs.runs.redis_state.submission import Submission


def with_reused(context: JobContext, storage: Storage, plan: Plan, submission: Submission) -> Plan:
    """Take what the runs that a submission names have answered; return the plan that says so.

    Its seed is the first one's, unless its arguments have one. Raises CannotReuse, InputError or OutputError.
    """
    spec = plan.spec
    if not submission.reuse:
        return plan
    old = OldRuns(storage, submission.reuse)
    seed = plan.seed if old.seed is None or "seed" in spec.sampling else old.seed
    reused = Reused(context.execution_id)
    plan = replace(plan, seed=seed, reused=reused)
    ask = ask_of(plan, context)
    look_up = partial(match, context, storage, plan, ask, old, submission.reuse_from_any_model)
    matches = look_up()
    if spec.only_new:
        for _ in answers(old, matches, look_up, pa.schema([pa.field("error", pa.string())])):
            pass  # it leaves of matches those that have no error, and can be read
        fresh = np.flatnonzero(matches.places < 0)
        plan = with_own_rows(context, storage, plan, fresh)
    else:
        fields = kind_of(spec).fields(spec, embedding_size(spec, context.model))
        beside_answers = pa.schema([*BESIDE, *fields])
        with RowBuckets(plan.rows) as taken:
            for rows, batch, sources in answers(old, matches, look_up, pa.schema(fields)):
                marks = [matches.marks[number].tobytes() for number in matches.models[rows]]
                beside = [pa.array(rows), pa.array(marks, pa.binary(SIZE)), pa.array(sources, pa.string())]
                taken.add(rows, pa.RecordBatch.from_arrays([*beside, *batch.columns], schema=beside_answers))
            write_taken(storage, plan, taken)
    runs = tuple(map(asdict, old.told))
    return replace(plan, reused=Reused(reused.name, ask.keys.name, submission.reuse_from_any_model, runs))


def remove_reused(storage: Storage, plan: Plan, first: Plan) -> None:
    """Remove what was written for a plan where `first` is in its place. The two are one if a reply was lost."""
    if plan.reused is None or (first.reused is not None and first.reused.name == plan.reused.name):
        return
    paths = list(map(plan.reused_path, range(len(plan.shards))))
    if plan.files[0].kept is not None:
        paths += [plan.rows_path(plan.files[0]), os.path.join(plan.spec.output, kept_name(0, plan.reused.name))]
    with writing(plan.spec.output):
        for path in paths:
            storage.remove(path)


@dataclass
class Matches:
    """Of each row of a new run the place of the old row with its answer, -1 for none, and which of `marks` that has."""

    places: Places
    models: npt.NDArray[np.uint16]
    marks: Keys


def match(
    context: JobContext,
    storage: Storage,
    plan: Plan,
    ask: Ask,
    old: OldRuns,
    any_model: bool,
    found: Matches | None = None,
) -> Matches:
    """Look up each row of a plan, whose inputs can be read. found: has no match of those that are looked up again."""
    marks = model_mark(context.model.fingerprint)
    if plan.second is not None:
        marks = np.concatenate([marks, model_mark(plan.second.fingerprint)])
    if any_model:
        marks = np.concatenate([marks, old.marks])  # its own answers first
    found = found or Matches(np.full(plan.rows, -1, np.int64), np.zeros(plan.rows, np.uint16), marks)
    repeated = np.array(plan.repeated, np.int64)  # ascending
    for start, rows in rendered_shards(context, storage, plan, ask.source):
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
    old: OldRuns, matches: Matches, look_up: Callable[[Matches], Matches], schema: pa.Schema
) -> Iterator[tuple[npt.NDArray[np.int64], pa.RecordBatch, list[str]]]:
    """Yield answers by the names of `schema`: the new rows that have them, and which old rows they are."""
    is_taken = np.zeros(len(matches.places), bool)
    for run in old.told:
        rows = np.flatnonzero((matches.places >= 0) & ~is_taken)
        rows = rows[np.argsort(matches.places[rows], kind="stable")]
        for part, which, batch in old.answers(matches.places[rows], schema):
            is_taken[rows[which]] = True
            part.told.rows += len(which)
            first = part.plan.first_row(part.shard) - part.first
            yield rows[which], batch, [f"{part.told.output}#{place + first}" for place in matches.places[rows[which]]]
        lost = rows[~is_taken[rows]]
        old.keys.forget(matches.places[lost])
        matches.places[lost] = -1
        if not len(lost) or run is old.told[-1]:
            return
        look_up(matches)
