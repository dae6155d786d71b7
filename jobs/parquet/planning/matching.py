"""Finds, for the rows of a new plan, which of them earlier runs have answered, and takes these answers."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.context import JobContext
from jobs.parquet.asks.ask import Ask
from jobs.parquet.asks.row_keys import SIZE, Keys, model_mark, row_keys
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts.prompt_source import RowSource
from jobs.parquet.reuse.known_keys import Places
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.reuse.taken_answers import TakenAnswers
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.runs.plans.plan import Plan


@dataclass
class Matches:
    """Of each row of a new run the place of the old row with its answer, -1 for none, and which of `marks` that has."""

    places: Places
    models: npt.NDArray[np.uint8]
    marks: Keys


def match(
    context: JobContext, storage: Storage, plan: Plan, asks: tuple[Ask, RowSource], old: OldRuns, any_model: bool
) -> Matches:
    """Look up each row of a plan, whose inputs can be read. asks: what is asked, of which rows. Raises InputError."""
    ask, source = asks
    marks = model_mark(context.model.fingerprint)
    if any_model:
        marks = np.concatenate([marks, old.marks])  # its own answers first
    found = Matches(np.full(plan.rows, -1, np.int64), np.zeros(plan.rows, np.uint8), marks)
    for start, rows in rendered_shards(context, storage, plan, source):
        places, models = found.places[start : start + len(rows)], found.models[start : start + len(rows)]
        keys = row_keys(ask.key_of, rows)
        asked: npt.NDArray[np.bool_] = np.any(keys, axis=1)
        asked[[row - start for row in plan.repeated if 0 <= row - start < len(rows)]] = False
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


def keep_answered(old: OldRuns, matches: Matches) -> None:
    """Leave of matches those that have no error, and can be read."""
    for _ in answers(old, matches, pa.schema([pa.field("error", pa.string())])):
        pass
