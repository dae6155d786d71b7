"""Answers taken from earlier runs, beside the plan: a file for each shard that has some, until the run ends."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.context.answers import Answer
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.plan import Plan

#: What stands beside the answer's columns: its row in the shard, the mark of the model, and which old row it was. In
#: a journal the key that the row has in `_keys/`.
ROW, MODEL, SOURCE, KEY = "_row", "_model", "_source", "_key"
BESIDE = [pa.field(ROW, pa.int64()), pa.field(MODEL, pa.binary(16)), pa.field(SOURCE, pa.string())]

#: Rows that are sorted at once, and so many files for that at most.
BUCKET_ROWS, MAX_BUCKETS = 1 << 16, 256


class TakenAnswers:
    """Sorts answers, which come in the old runs' order, by shards of the new plan. Used in a `with` block."""

    def __init__(self, storage: Storage, plan: Plan, schema: pa.Schema) -> None:
        """schema: of the answers, by their own names."""
        self._storage, self._plan = storage, plan
        self._schema = pa.schema([*BESIDE, *schema])
        self._firsts = np.array([plan.first_row(shard) for shard in range(len(plan.shards))])
        self._bucket_of = np.cumsum([shard.rows for shard in plan.shards]) // max(BUCKET_ROWS, plan.rows // MAX_BUCKETS)
        self._streams: dict[int, tuple[str, Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TakenAnswers:
        self._local = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, rows: npt.NDArray[np.int64], answers: pa.RecordBatch, marks: pa.Array, sources: pa.Array) -> None:
        """Take answers. rows: those of the new run that have them."""
        batch = pa.RecordBatch.from_arrays([pa.array(rows), marks, sources, *answers.columns], schema=self._schema)
        buckets = self._bucket_of[self._shards_of(rows)]
        for bucket in np.unique(buckets):
            self._stream(int(bucket)).write_batch(batch.filter(pa.array(buckets == bucket)))

    def write(self) -> None:
        """Write the files of all shards that have answers. Raises DiskFull or OutputNotWritable."""
        folder = os.path.dirname(self._plan.reused_path(0))
        with writing(folder):
            self._storage.make_folder(folder)
        for path, stream in self._streams.values():
            stream.close()
            with pa.memory_map(path) as source:
                self._write(pa.ipc.open_stream(source).read_all())

    def _write(self, table: pa.Table) -> None:
        """Write the shards of a bucket, of which the answers of one at a time are in memory."""
        shards = self._shards_of(table.column(ROW).to_numpy())
        for shard in np.unique(shards):
            self._storage.check_interrupted()
            part = table.filter(pa.array(shards == shard))
            own = pc.subtract(part.column(ROW), pa.scalar(int(self._firsts[shard])))
            part = part.set_column(0, BESIDE[0], own)
            path = self._plan.reused_path(int(shard))
            with writing(path), self._storage.open_output(path) as sink:
                pq.write_table(part, sink)

    def _shards_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._firsts, rows, "right") - 1

    def _stream(self, bucket: int) -> Any:
        if bucket not in self._streams:
            path = os.path.join(self._local, str(bucket))
            self._streams[bucket] = path, self._stack.enter_context(pa.ipc.new_stream(path, self._schema))
        return self._streams[bucket][1]


def taken_answers(storage: Storage, plan: Plan, shard: int, asked: str) -> dict[int, tuple[Answer, bytes]]:
    """Return the answers that rows of a shard, counted within it, have from earlier runs, with their models' marks.

    asked: RowKeys.name; where planning knew another check, none is taken. Raises CorruptParquet or TableNotRead.
    """
    if plan.reused is None or plan.reused.asked != asked:
        return {}
    path = plan.reused_path(shard)
    if storage.stat(path) is None:
        return {}
    beside = [field.name for field in BESIDE]
    with closing(TableReading(storage, path)) as file:
        return {
            row: (replace(answer, reused=source), mark) for (row, mark, source), answer in read_answers(file, beside)
        }


def read_answers(file: TableReading, beside: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Answer]]:
    """Yield what stands in some columns beside each answer, and the answer. Raises CorruptParquet or TableNotRead."""
    for batch in file.batches():
        # What a row has many of stays Arrow's.
        large = [field.name for field in batch.schema if _holds_structs(field.type)]
        for number, values in enumerate(batch.drop_columns(large).to_pylist()):
            found = tuple(values.pop(name) for name in beside)
            slices = {name: batch.column(name).slice(number, 1) for name in large}
            values |= {name: each if each.is_valid()[0].as_py() else None for name, each in slices.items()}
            yield found, _answer(values)


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
