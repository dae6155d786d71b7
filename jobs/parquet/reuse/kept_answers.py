"""The answers that the first model of a cascade has given to a shard's rows, for the job that asks the second model.

A file beside the journals for each shard that has rows with low margins, without these; of two executions the first
one's stays. Later runs find it as they find a journal.
"""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.context.answers import Answer
from jobs.errors import KeptAnswersLost
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import SIZE, Keys
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.part import answer_column
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.reuse.old_runs import UNREADABLE
from jobs.parquet.reuse.taken_answers import BESIDE, KEY, read_answers
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import JOURNAL
from jobs.runs.plans.plan import Plan

_BESIDE = [*BESIDE, pa.field(KEY, pa.binary(SIZE))]


def kept_path(plan: Plan, shard: int) -> str:
    """Return where a shard's kept answers are."""
    return os.path.join(plan.spec.output, JOURNAL, f"_kept.{shard:05d}.answers")


def has_kept(folder: RunFolder, shard: int) -> bool:
    return folder.storage.stat(kept_path(folder.plan, shard)) is not None


def keep_answers(folder: RunFolder, shard: int, answers: Mapping[int, Answer], marks: Keys, keys: Keys) -> None:
    """Put answers in place, unless some are there. marks, keys: of all rows, as write_keys takes them.

    Raises DiskFull or OutputNotWritable, also where the run has ended.
    """
    path, spec = kept_path(folder.plan, shard), folder.plan.spec
    fields = kind_of(spec).fields(spec, 0)
    own = [(row, marks[row].tobytes(), each.reused, (keys ^ marks)[row].tobytes()) for row, each in answers.items()]
    beside = [pa.array([each[place] for each in own], field.type) for place, field in enumerate(_BESIDE)]
    columns = [answer_column([each.column(field.name) for each in answers.values()], field.type) for field in fields]
    table = pa.table([*beside, *columns], pa.schema([*_BESIDE, *fields]))
    folder.storage.put(path, folder.execution_id, lambda sink: pq.write_table(table, sink))


def kept_answers(storage: Storage, plan: Plan, shard: int) -> dict[int, tuple[Answer, bytes]]:
    """Return what was kept of a shard, as taken_answers does. Raises KeptAnswersLost."""
    path, beside = kept_path(plan, shard), [field.name for field in _BESIDE]
    try:
        with closing(TableReading(storage, path)) as file:
            found = {row: (replace(each, reused=old), mark) for (row, mark, old, _), each in read_answers(file, beside)}
    except (*UNREADABLE, LookupError, TypeError, ValueError) as error:
        raise KeptAnswersLost(path, f"{type(error).__name__}: {error}") from None
    return found
