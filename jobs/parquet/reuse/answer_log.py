"""The log of answers: a file with what is known about a shard's rows before the shard's part is written.

One format serves the journal of an open shard, the answers that a cascade's first model leaves to the job of the second
one, and the answers that planning takes from earlier runs. These logs differ only in their paths, and in who removes
them.

A log is a Parquet file. Each record has the number of a row, a key and a hash of a model, and either the columns of an
answer or the progress of a row under way. The key is a hash of what the row asks and of the model that answers; see
jobs/parquet/asks/row_keys.py. The footer has FORMAT, the shard that the log belongs to, and the number of records.
Pages have checksums.
"""

import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.common.keys import FORMAT
from jobs.context.answers import Answer
from jobs.errors import (
    AnswersDamaged,
    CorruptParquet,
    InputNotFound,
    PathSwapped,
    RunError,
    TableNotRead,
)
from jobs.items.records import Progress
from jobs.parquet.asks.row_keys import SIZE, Keys, as_keys, whole_keys
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.part import answer_column
from jobs.parquet.tables.columns import ALL_COLUMNS, ColumnChoice
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import KEY, LOG_COLUMNS, MODEL, ROW, SOURCE, TOKENS, UNDER_WAY
from jobs.runs.plans.plan import Plan
from sandbox.exhausted import is_exhausted

#: Errors of a file that cannot be read.
UNREADABLE = (CorruptParquet, TableNotRead, InputNotFound, PathSwapped)
#: Python's errors when our code reads a file with other contents than it writes.
_UNFIT = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)

#: The key of the header in the footer's metadata.
_HEADER = b"answers"
_TYPES = {
    ROW: pa.int64(),
    KEY: pa.binary(SIZE),
    MODEL: pa.binary(SIZE),
    SOURCE: pa.string(),
    TOKENS: pa.int64(),
    UNDER_WAY: pa.string(),
}
_log = logging.getLogger("rq.worker")


@dataclass(frozen=True, slots=True)
class Record:
    """What a log knows about one row: its answer, or the progress of a row that has no answer yet.

    row: the row's number in the shard, from 0. model_hash: a hash of the model that answers the row.
    num_tokens: how many tokens were generated for the answer. If equal rows share an answer, only the first row has its
    tokens, and the other rows have 0.
    """

    row: int
    model_hash: bytes
    answer: Answer | None = None
    num_tokens: int = 0
    progress: Progress | None = None


def log_schema(answer_fields: Sequence[pa.Field]) -> pa.Schema:
    """Return the columns of a log. answer_fields: the columns of the answers."""
    own_fields = [pa.field(name, _TYPES[name]) for name in LOG_COLUMNS]
    return pa.schema([*own_fields, *answer_fields])


def log_owner(plan: Plan, shard: int, ask_name: str) -> list[Any]:
    """Return what identifies the shard that a log belongs to: its run, number, seed and models, and what is asked.

    ask_name: a hash of what the run asks, see RowKeys.name.
    """
    second = None if plan.second is None else plan.second.pin
    return [plan.run, shard, plan.seed, plan.model.pin, second, ask_name]


def write_log(sink: Any, owner: list[Any], records: pa.Table) -> None:
    """Write a log. owner: see log_owner. records: a table with the columns of `log_schema`."""
    header = {"format": FORMAT, "owner": owner, "records": records.num_rows}
    table = records.replace_schema_metadata({_HEADER: json.dumps(header)})
    pq.write_table(table, sink, write_page_checksum=True)


def answer_records(
    rows: npt.NDArray[np.int64],
    keys: Keys,
    model_hashes: Keys,
    sources: Sequence[str],
    answers: pa.RecordBatch,
) -> pa.RecordBatch:
    """Return records for a log. answers: a column for each field of an answer.

    rows: the row of each answer. keys: hashes of what each row asked and of the model that answered. model_hashes:
    hashes of the models that answered. sources: the names of the rows in earlier runs.
    """
    no_tokens = np.zeros(len(rows), np.int64)  # nothing was generated here
    columns = [
        pa.array(rows),
        _as_column(keys),
        _as_column(model_hashes),
        pa.array(sources, pa.string()),
        pa.array(no_tokens),
        pa.nulls(len(rows), pa.string()),  # no row is under way
        *answers.columns,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=log_schema(list(answers.schema)))


@contextmanager
def open_log(
    storage: Storage, path: str, columns: ColumnChoice = ALL_COLUMNS
) -> Iterator[tuple[TableReading, dict[str, Any]]]:
    """Lend an opened log of any run, and the log's header.

    Raises AnswersDamaged for a log that cannot be read, and for an error that its contents cause in the `with` block.
    """
    try:
        with closing(TableReading(storage, path, columns)) as file:
            metadata = file.schema.metadata or {}
            header = json.loads(metadata[_HEADER])  # a KeyError is one of _UNFIT
            if header["format"] != FORMAT:
                raise AnswersDamaged(
                    path, f"it has format {header['format']}, and this version reads {FORMAT}"
                )
            yield file, header
    except (*UNREADABLE, *_UNFIT) as error:
        raise AnswersDamaged(path, f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class AnswerLog:
    """Writes and reads the logs of one shard.

    owner: what identifies the shard, as `log_owner` returns it. keys: the keys of the shard's rows, which do not cover
    the model. fields: the columns of the shard's answers.
    """

    owner: list[Any]
    keys: Keys
    fields: Sequence[pa.Field]

    def write(self, sink: Any, records: Sequence[Record]) -> None:
        """Write a log of these records."""
        rows = np.array([record.row for record in records], np.int64)
        model_hashes = as_keys(b"".join(record.model_hash for record in records))
        keys = whole_keys(self.keys[rows], model_hashes)
        token_counts = [record.num_tokens for record in records]
        progress_texts = [_progress_text(record) for record in records]
        columns = [  # in the order of log_schema
            pa.array(rows),
            _as_column(keys),
            _as_column(model_hashes),
            pa.array(_values(records, "reused"), pa.string()),
            pa.array(token_counts, pa.int64()),
            pa.array(progress_texts, pa.string()),
        ]
        for field in self.fields:
            columns.append(answer_column(_values(records, field.name), field.type))
        write_log(sink, self.owner, pa.table(columns, schema=log_schema(self.fields)))

    def read(self, storage: Storage, path: str) -> list[Record]:
        """Return a log's records. Raises AnswersDamaged for a log that is damaged or of another shard."""
        records: list[Record] = []
        with open_log(storage, path) as (file, header):
            if header["owner"] != self.owner:
                raise AnswersDamaged(path, "it is of another plan, check or model")
            if not file.schema.equals(log_schema(self.fields)):
                raise AnswersDamaged(path, "it has other columns than the answers of this run")
            for batch in file.batches:
                self._check_keys(path, batch)
                records += _records(batch)
            if len(records) != header["records"]:
                raise AnswersDamaged(path, f"it has {len(records)} of {header['records']} records")
        return records

    def read_if_whole(self, storage: Storage, path: str) -> list[Record]:
        """Return a log's records; [] if the log cannot be read. The caller computes the rows that have no record."""
        try:
            return self.read(storage, path)
        except (OSError, RunError) as error:
            if is_exhausted(error):
                raise
            _log.warning("%s is passed over, and its rows are computed again: %s", path, error)
            return []

    def _check_keys(self, path: str, batch: pa.RecordBatch) -> None:
        """Raise AnswersDamaged if a record's row is not in the shard, or if the record's key is not that row's key."""
        rows = rows_in(path, batch, len(self.keys))
        model_hashes = hashes_in(batch.column(MODEL))
        expected_keys = whole_keys(self.keys[rows], model_hashes)
        keys = hashes_in(batch.column(KEY))
        has_other_key = (keys != expected_keys).any(axis=1)
        if has_other_key.any():
            first_row = rows[has_other_key][0]
            raise AnswersDamaged(
                path,
                f"its record of row {first_row} belongs to another row, or to another prompt of it",
            )


def rows_in(path: str, batch: pa.RecordBatch, num_rows: int) -> npt.NDArray[np.int64]:
    """Return the rows of a log's records. Raises AnswersDamaged for a row that the shard does not have."""
    rows: npt.NDArray[np.int64] = np.asarray(batch.column(ROW).fill_null(-1))
    if ((rows < 0) | (rows >= num_rows)).any():
        raise AnswersDamaged(path, f"it has records of other rows than 0 to {num_rows - 1}")
    return rows


def hashes_in(column: pa.Array) -> Keys:
    """Return the keys in a log's column of keys, or the hashes in its column of models. Raises TypeError for a null."""
    return as_keys(b"".join(column.to_pylist()))


def _as_column(keys: Keys) -> pa.Array:
    """Return keys or hashes of models as a log's column."""
    buffer = pa.py_buffer(np.ascontiguousarray(keys, "<u8"))
    no_nulls = None
    return pa.Array.from_buffers(pa.binary(SIZE), len(keys), [no_nulls, buffer])


def _values(records: Sequence[Record], column: str) -> list[Any]:
    """Return the value of each record's answer in a column; None for a record without an answer."""
    values = []
    for record in records:
        values.append(None if record.answer is None else record.answer.column(column))
    return values


def _progress_text(record: Record) -> str | None:
    """Return a record's progress as JSON; None if the record has an answer."""
    return None if record.progress is None else json.dumps(record.progress.to_json())


def _records(batch: pa.RecordBatch) -> Iterator[Record]:
    """Yield the records of a log's batch."""
    answers = _answers(batch.drop_columns([ROW, KEY, MODEL, TOKENS, UNDER_WAY]))
    other_values = batch.select([ROW, MODEL, TOKENS, UNDER_WAY]).to_pylist()
    for values, answer in zip(other_values, answers, strict=True):
        row = values[ROW]
        model_hash = values[MODEL]
        progress_text = values[UNDER_WAY]
        if progress_text is None:
            yield Record(row, model_hash, answer, values[TOKENS])
        else:
            progress = Progress.from_json(json.loads(progress_text))
            yield Record(row, model_hash, progress=progress)


def _answers(batch: pa.RecordBatch) -> Iterator[Answer]:
    """Yield the answers in a log's batch. The batch must have only the columns of answers and of their sources."""
    # Lists of structs stay Arrow arrays, one for each row. Python's objects would take ten times as much memory.
    nested = [field.name for field in batch.schema if _holds_structs(field.type)]
    for number, values in enumerate(batch.drop_columns(nested).to_pylist()):
        for name in nested:
            array_of_row = batch.column(name).slice(number, 1)
            values[name] = None if array_of_row.null_count else array_of_row
        values["reused"] = values.pop(SOURCE)
        yield _answer(values)


def _holds_structs(kind: pa.DataType) -> bool:
    """Whether values are lists of structs, or lists of such lists."""
    if not pa.types.is_list(kind):
        return False
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_struct(kind))


_ANSWER_FIELDS = {field.name for field in fields(Answer)} - {"columns"}


def _answer(values: Mapping[str, Any]) -> Answer:
    """Return an answer from its values by column. Each kind of answer has only some of the columns."""
    answer_fields: dict[str, Any] = {  # the values if the log lacks these columns
        "completion": None,
        "finish_reason": "stop",
        "completion_tokens": 0,
    }
    columns: dict[str, Any] = {}
    for name, value in values.items():
        if name in _ANSWER_FIELDS:
            answer_fields[name] = tuple(value) if isinstance(value, list) else value
        elif isinstance(value, list) and value and isinstance(value[0], float):
            columns[name] = array("f", value)  # an embedding
        else:
            columns[name] = value
    return Answer(**answer_fields, columns=columns)
