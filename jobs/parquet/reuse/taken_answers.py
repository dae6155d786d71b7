"""Answers that a shard's rows have before it is asked, in a file for each shard that has some, until the run ends.

Planning takes them from earlier runs and puts them beside the plan. Those that the first model of a cascade has given,
for the job that asks the second one, lie beside the journals, without those of low margins: of two executions the first
one's stay, and later runs find them as they find a journal.
"""

import logging
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.context.answers import Answer
from jobs.errors import (
    CorruptParquet,
    InputNotFound,
    KeptAnswersLost,
    PartDamaged,
    PathSwapped,
    TableNotRead,
)
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import SIZE, Keys, as_keys
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.outputs.part import answer_column
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.tables.row_groups import RowBuckets
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import JOURNAL, KEY, MODEL, ROW, SOURCE
from jobs.runs.plans.plan import Plan

KEY_FIELD, NO_KEY = pa.field(KEY, pa.binary(SIZE)), bytes(SIZE)
BESIDE = [
    pa.field(ROW, pa.int64()),
    pa.field(MODEL, pa.binary(SIZE)),
    pa.field(SOURCE, pa.string()),
    KEY_FIELD,
]
#: What is raised for a file of a run that cannot be read; and for one that can be, and does not hold what it should.
UNREADABLE = (PartDamaged, CorruptParquet, TableNotRead, InputNotFound, PathSwapped)
_UNFIT = (*UNREADABLE, LookupError, TypeError, ValueError)
_log = logging.getLogger("rq.worker")


def write_taken(storage: Storage, plan: Plan, buckets: RowBuckets) -> None:
    """Write the files of all shards that have answers. buckets: BESIDE, with rows of the run, and answers' columns."""
    firsts = np.array([plan.first_row(shard) for shard in range(len(plan.shards))])
    storage.make_folder(os.path.dirname(plan.reused_path(0)))
    for shard, answers in _by_shard(buckets, firsts):
        storage.check_interrupted()
        path, own = (
            plan.reused_path(shard),
            pc.subtract(answers.column(ROW), pa.scalar(int(firsts[shard]))),
        )
        with writing(path), storage.open_output(path) as sink:
            pq.write_table(answers.set_column(0, BESIDE[0], own), sink, write_page_checksum=True)


def _by_shard(buckets: RowBuckets, firsts: npt.NDArray[np.int64]) -> Iterator[tuple[int, pa.Table]]:
    waiting, last = list[pa.Table](), -1
    for table in buckets.sorted():
        shards = np.searchsorted(firsts, table.column(ROW).to_numpy(), "right") - 1
        for shard in map(int, np.unique(shards)):
            if waiting and shard != last:
                yield last, pa.concat_tables(waiting)
                waiting.clear()
            waiting.append(table.filter(pa.array(shards == shard)))
            last = shard
    if waiting:
        yield last, pa.concat_tables(waiting)


def taken_answers(
    storage: Storage, plan: Plan, shard: int, asked: str, keys: Keys
) -> dict[int, tuple[Answer, bytes]]:
    """Return the answers that a shard's rows, counted within it, have from earlier runs, with their models' marks; none
    where planning knew another check, or the file is damaged. asked: RowKeys.name. keys: the rows', without a model."""
    if plan.reused is None or plan.reused.asked != asked:
        return {}
    path = plan.reused_path(shard)
    try:
        return {} if storage.stat(path) is None else _answers_of(storage, path, keys)
    except _UNFIT as error:  # they only save time
        _log.warning("the earlier answers in %s are passed over: %s", path, error)
        return {}


def _kept_path(plan: Plan, shard: int) -> str:
    return os.path.join(plan.spec.output, JOURNAL, f"_kept.{shard:05d}.answers")


def has_kept(folder: RunFolder, shard: int) -> bool:
    return folder.storage.stat(_kept_path(folder.plan, shard)) is not None


def keep_answers(
    folder: RunFolder, shard: int, answers: Mapping[int, Answer], marks: Keys, keys: Keys
) -> None:
    """Put the first model's answers in place, unless some are there. marks, keys: as write_keys takes them."""
    spec = folder.plan.spec
    beside = [
        (row, marks[row].tobytes(), each.reused, (keys ^ marks)[row].tobytes())
        for row, each in answers.items()
    ]
    table = answers_table(BESIDE, beside, list(answers.values()), kind_of(spec).fields(spec, 0))
    path = _kept_path(folder.plan, shard)
    folder.storage.put(
        path,
        folder.execution_id,
        lambda sink: pq.write_table(table, sink, write_page_checksum=True),
    )


def kept_answers(
    storage: Storage, plan: Plan, shard: int, keys: Keys
) -> dict[int, tuple[Answer, bytes]]:
    """Return what was kept of a shard, as taken_answers does. Raises KeptAnswersLost."""
    path = _kept_path(plan, shard)
    try:
        return _answers_of(storage, path, keys)
    except _UNFIT as error:
        raise KeptAnswersLost(path, f"{type(error).__name__}: {error}") from None


def _answers_of(storage: Storage, path: str, keys: Keys) -> dict[int, tuple[Answer, bytes]]:
    found: dict[int, tuple[Answer, bytes]] = {}
    with closing(TableReading(storage, path)) as file:
        for (row, mark, key), answer in read_answers(file, (ROW, MODEL, KEY)):
            check_key(path, keys, row, key, mark)
            found[row] = answer, mark
    return found


def check_key(path: str, keys: Keys, row: Any, key: bytes, mark: bytes = NO_KEY) -> None:
    """Raise PartDamaged for what is no shard's row, or asked something else, as one whose picture was another then."""
    is_row = type(row) is int and row in range(len(keys))
    if not is_row or key not in (
        NO_KEY,
        (keys[row] ^ as_keys(mark)).tobytes(),
    ):  # none of one that has failed
        raise PartDamaged(
            path, f"what it has of row {row} is of another row, or of what that asked before"
        )


def answers_table(
    beside: Sequence[pa.Field],
    values: Sequence[Sequence[Any]],
    answers: Sequence[Answer],
    fields: Sequence[pa.Field],
) -> pa.Table:
    """Return answers as a table. values: of the columns `beside` each answer. fields: of the answers' columns."""
    columns = [
        pa.array([each[place] for each in values], field.type) for place, field in enumerate(beside)
    ]
    columns += [answer_column(answers, field.name, field.type) for field in fields]
    return pa.table(columns, pa.schema([*beside, *fields]))


def read_answers(
    file: TableReading, beside: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], Answer]]:
    """Yield what stands in some columns beside each answer, and the answer. Raises CorruptParquet or TableNotRead."""
    for batch in file.batches:
        # What a row has many of stays Arrow's.
        large = [field.name for field in batch.schema if _holds_structs(field.type)]
        for number, values in enumerate(batch.drop_columns(large).to_pylist()):
            found = tuple(values.pop(name) for name in beside)
            slices = {name: batch.column(name).slice(number, 1) for name in large}
            values |= {
                name: each if each.is_valid()[0].as_py() else None for name, each in slices.items()
            }
            values["reused"] = values.pop(SOURCE, None)
            yield found, _answer(values)


_OWN = {each.name for each in fields(Answer)} - {"columns"}


def _answer(values: Mapping[str, Any]) -> Answer:
    own: dict[str, Any] = {"completion": None, "finish_reason": "stop", "completion_tokens": 0}
    columns: dict[str, Any] = {}
    for name, each in values.items():
        if name in _OWN:
            own[name] = tuple(each) if isinstance(each, list) else each
        else:
            has_floats = isinstance(each, list) and each and isinstance(each[0], float)
            columns[name] = array("f", each) if has_floats else each
    return Answer(**own, columns=columns)


def _holds_structs(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_struct(kind))
