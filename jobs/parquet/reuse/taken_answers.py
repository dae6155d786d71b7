"""Files of answers that a shard's rows have before its part is there: in `_journal/`, until the run ends.

Planning writes those that it takes from earlier runs, each execution those that it has computed (shard_journal.py), and
the first job of a cascade those of which the second model is not asked: of two executions the first one's stay. Later
runs find answers there as in a part.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.context.answers import Answer
from jobs.errors import CorruptParquet, InputNotFound, KeptAnswersLost, PartDamaged, PathSwapped, TableNotRead
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import SIZE, Keys, as_keys
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.outputs.part import answer_column
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.tables.row_buckets import RowBuckets
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import JOURNAL
from jobs.runs.plans.plan import Plan

#: What stands beside an answer's columns: its row in the shard, the mark of the model, which old row it was, the tokens
#: generated for it and equal rows (with the first of them), and the key that the row has in `_keys/`.
ROW, MODEL, SOURCE, TOKENS, KEY = "_row", "_model", "_source", "_tokens", "_key"
_TYPES = (pa.int64(), pa.binary(SIZE), pa.string(), pa.int64(), pa.binary(SIZE))
BESIDE = list(map(pa.field, (ROW, MODEL, SOURCE, TOKENS, KEY), _TYPES))

#: The same of answers that planning takes.
TAKEN = BESIDE[:3]

#: The key of a file's metadata that says of which asks it holds answers.
WHOSE = b"whose"

#: What is raised for a file of a run that cannot be read.
UNREADABLE = (PartDamaged, CorruptParquet, TableNotRead, InputNotFound, PathSwapped)


def whose(plan: Plan, shard: int, fingerprint: str, asked: str) -> bytes:
    """Return what a shard's files say. fingerprint: of the model that reads them. asked: RowKeys.name."""
    return f"1 {plan.run} {shard} {plan.seed} {fingerprint} {asked}".encode()


def taken_path(plan: Plan, shard: int) -> str:
    """Return where answers for a shard's rows are that were taken from earlier runs."""
    assert plan.reused is not None
    return os.path.join(plan.spec.output, JOURNAL, f"_{shard:05d}.{plan.reused.name}.taken")


def write_taken(storage: Storage, plan: Plan, fingerprint: str, asked: str, buckets: RowBuckets) -> None:
    """Write the files of all shards that have answers. buckets: TAKEN, with rows of the run, and answers' columns."""
    firsts = np.array([plan.first_row(shard) for shard in range(len(plan.shards))])
    folder = os.path.dirname(taken_path(plan, 0))
    storage.make_folder(folder)
    for shard, answers in _by_shard(buckets, firsts):
        storage.check_interrupted()
        own = pc.subtract(answers.column(ROW), pa.scalar(int(firsts[shard])))
        table = answers.set_column(0, TAKEN[0], own)
        with writing(path := taken_path(plan, shard)), storage.open_output(path) as sink:
            pq.write_table(table.replace_schema_metadata({WHOSE: whose(plan, shard, fingerprint, asked)}), sink)


def _by_shard(buckets: RowBuckets, firsts: npt.NDArray[np.int64]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the shards that have answers, with these. firsts: of each shard the first row."""
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


def _kept_path(plan: Plan, shard: int) -> str:
    return os.path.join(plan.spec.output, JOURNAL, f"_kept.{shard:05d}.answers")


def has_kept(folder: RunFolder, shard: int) -> bool:
    """Return whether the first model of a cascade has left rows to the second one."""
    return folder.storage.stat(_kept_path(folder.plan, shard)) is not None


def keep_answers(folder: RunFolder, shard: int, answers: Mapping[int, Answer], keys: Keys, own: bytes) -> None:
    """Put the first model's answers in place, unless some are there. keys, own: as of answers_table.

    Raises DiskFull or OutputNotWritable, also where the run has ended.
    """
    spec = folder.plan.spec
    table = answers_table([(row, 0, each) for row, each in answers.items()], keys, own, kind_of(spec).fields(spec, 0))
    path = _kept_path(folder.plan, shard)
    folder.storage.put(path, folder.execution_id, lambda sink: pq.write_table(table, sink))


def kept_answers(storage: Storage, plan: Plan, shard: int, own: bytes) -> dict[int, Answer]:
    """Return what was kept of a shard. Raises KeptAnswersLost."""
    path = _kept_path(plan, shard)
    try:
        with closing(TableReading(storage, path)) as file:
            return {row: answer for row, _, answer in read_answers(file, own)}
    except (*UNREADABLE, LookupError, TypeError, ValueError) as error:
        raise KeptAnswersLost(path, f"{type(error).__name__}: {error}") from None


def answers_table(
    answered: Sequence[tuple[int, int, Answer]], keys: Keys, own: bytes, fields: Sequence[pa.Field]
) -> pa.Table:
    """Return answers with their rows and TOKENS as a table. keys: of all rows, without a model. own: the mark of the
    model that is served. fields: of the answers' columns."""
    columns: list[list[Any]] = [[] for _ in BESIDE]
    for row, tokens, each in answered:
        mark = each.mark or own
        key = bytes(SIZE) if each.error else (as_keys(mark) ^ keys[row]).tobytes()
        for column, value in zip(columns, (row, mark, each.reused, tokens, key), strict=True):
            column.append(value)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, BESIDE, strict=True)]
    arrays += [answer_column([each.column(field.name) for *_, each in answered], field.type) for field in fields]
    return pa.table(arrays, pa.schema([*BESIDE, *fields]))


def read_answers(file: TableReading, own: bytes) -> Iterator[tuple[int, int, Answer]]:
    """Yield answers with their rows and TOKENS. own: see answers_table. Raises CorruptParquet or TableNotRead."""
    for batch in file.batches:
        # What a row has many of stays Arrow's.
        large = [field.name for field in batch.schema if _holds_structs(field.type)]
        for number, values in enumerate(batch.drop_columns(large).to_pylist()):
            row, mark, source, tokens, _ = (values.pop(field.name, None) for field in BESIDE)
            slices = {name: batch.column(name).slice(number, 1) for name in large}
            values |= {name: each if each.is_valid()[0].as_py() else None for name, each in slices.items()}
            yield row, tokens or 0, replace(_answer(values), reused=source, mark=None if mark == own else mark)


_OWN = {each.name for each in fields(Answer)} - {"columns"}


def _answer(values: Mapping[str, Any]) -> Answer:
    """Return an answer of the columns that a part has of it."""
    own: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in values.items() if name in _OWN
    }
    columns = {
        name: array("f", each) if isinstance(each, list) and each and isinstance(each[0], float) else each
        for name, each in values.items()
        if name not in _OWN
    }
    absent = {"completion": None, "finish_reason": "stop", "completion_tokens": 0}
    return Answer(**{**absent, **own, "columns": columns})


def _holds_structs(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_struct(kind))
