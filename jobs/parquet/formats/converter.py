"""What a child does that turns a run's files into Parquet: it looks for the columns of one, then writes it.

Text says what a column holds only when all of it was read: there are two passes over the same groups of rows.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.common.display import brief
from jobs.errors import CorruptTable, SchemaMismatch, TooManyBadLines
from jobs.parquet.formats import kinds
from jobs.parquet.formats.records import Record, TextFile, csv_records, json_records
from jobs.parquet.tables.columns import AS_JSON, PROBLEM, PROBLEM_FIELD
from jobs.parquet.tables.row_groups import GROUP_ROWS, grouped
from jobs.parquet.tables.table_child import Replies, with_file
from jobs.runs.plans.names import ARROW, HEADED, OPENAI_BATCH

#: Rows and bytes that are Python's at a time.
SLICE_ROWS, SLICE_BYTES = 1024, 1 << 21

MAX_COLUMNS = 10_000
#: If a larger share of rows cannot be read, the file is not what it is taken for. Fewer rows in all say nothing.
MAX_BAD_SHARE, MIN_JUDGED_ROWS = 0.1, 20

_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
_BATCH_KINDS: Mapping[str, kinds.Kind] = {"custom_id": "text", "request": "json"}
#: Types of Arrow's that Parquet has not, and what takes their place.
_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


@with_file
def scan(question: Mapping[str, Any], source: Any) -> Replies:
    """Tell kinds, schema, rows and bytes of a file's groups."""
    with _opened(question, source) as table:
        slices = table.slices(question["rows"])
        looked_at = grouped((rows, size, table.look(part)) for rows, size, part in slices)
        groups = [(rows, size) for rows, size, _ in looked_at]
        table.check_read()
        yield {"kinds": table.kinds, "groups": groups}, table.schema.serialize().to_pybytes()


@with_file
def convert(question: Mapping[str, Any], source: Any) -> Replies:
    """Reply with a Parquet file of `rows` rows, in pieces. The question's `kinds` are those of all columns.

    Its `as_json` names columns that the file has twice: the second time as the JSON of each row.
    """
    sink = io.BytesIO()
    file = pa.PythonFile(sink, "w")  # which closes the sink when it goes
    with _opened(question, source) as table:
        table.kinds = dict(question["kinds"])
        table.as_json = tuple(question.get("as_json", ()))
        schema = table.schema
        with pq.ParquetWriter(file, schema) as writer:
            slices = table.slices(question["rows"])
            for _, _, batches in grouped((rows, size, table.batch(part, schema)) for rows, size, part in slices):
                writer.write_table(pa.Table.from_batches(batches, schema))
                yield {}, _taken(sink)
    yield {}, _taken(sink)


def _taken(sink: io.BytesIO) -> bytes:
    found = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return found


@contextmanager
def _opened(question: Mapping[str, Any], source: Any) -> Iterator[Any]:
    path, file_format, dialect = question["path"], question["input_format"], question.get("dialect", {})
    if file_format == ARROW:
        yield _ArrowTable(path, source)
        return
    head = source.read_at(4, 0)
    codec = next((codec for mark, codec in _CODECS.items() if head.startswith(mark)), None)
    source.seek(0)
    with pa.input_stream(source, codec) as stream:
        yield _TextTable(TextFile(path, file_format, stream, dialect), dialect.get("decimal", "."))


class _TextTable:
    def __init__(self, file: TextFile, decimal: str) -> None:
        self._file, self._decimal = file, decimal
        self._path, self._format = file.path, file.format
        self._rows = self._bad = 0
        self._first_bad: Record | None = None
        self.as_json: Sequence[str] = ()
        self.kinds: dict[str, kinds.Kind] = dict(_BATCH_KINDS) if file.format == OPENAI_BATCH else {}
        if file.format in HEADED:
            names, self._records = csv_records(file)
            self.kinds = dict.fromkeys(names, "null")
            self._check_names()
        else:
            self._records = json_records(file)

    @property
    def schema(self) -> pa.Schema:
        fields = [kinds.arrow_field(name, kind) for name, kind in self.kinds.items()]
        beside = [pa.field(AS_JSON + name, pa.string()) for name in self.as_json]
        return pa.schema([*fields, *beside, PROBLEM_FIELD])

    def slices(self, most: int | None) -> Iterator[tuple[int, int, list[Record]]]:
        part: list[Record] = []
        size = 0
        for each in islice(self._records, most):
            part.append(each)
            size += each.size
            self._rows += 1
            if each.problem:
                self._bad += 1
                self._first_bad = self._first_bad or each
            if len(part) == SLICE_ROWS or size > SLICE_BYTES:
                yield len(part), size, part
                part, size = [], 0
        if part:
            yield len(part), size, part

    def check_read(self) -> None:
        """Raise OtherEncoding or TooManyBadLines if too many of the lines read are no rows."""
        self._file.check_encoding()
        is_judged = self._rows >= MIN_JUDGED_ROWS or not self.kinds  # without a row, JSON lines have no columns
        if self._first_bad is not None and is_judged and self._bad > self._rows * MAX_BAD_SHARE:
            first = self._first_bad
            raise TooManyBadLines(self._path, self._bad, self._rows, first.line, first.problem)

    def look(self, part: Sequence[Record]) -> None:
        """Take what rows hold into the kinds; those of a batch file are known."""
        if self._format == OPENAI_BATCH:
            return
        if self._format in HEADED:
            rows = [each.value for each in part if each.value is not None]
            for name, known in self.kinds.items():
                if known != "text":
                    self.kinds[name] = kinds.merged_texts(
                        known, kinds.kind_of_texts([row[name] for row in rows], self._decimal)
                    )
            return
        for each in part:
            for name, value in (each.value or {}).items():
                known = self.kinds.get(name, "null")
                if known != "json" and not (known == "text" and isinstance(value, str)):
                    self.kinds[name] = kinds.merged(known, kinds.kind_of(value))
        self._check_names()

    def _check_names(self) -> None:
        if taken := [name for name in self.kinds if name == PROBLEM or name.startswith(AS_JSON)]:
            raise SchemaMismatch(self._path, f"a column is named {brief(taken[0])}")
        if len(self.kinds) > MAX_COLUMNS:
            raise CorruptTable(self._path, self._format, f"it names more than {MAX_COLUMNS} columns")

    def batch(self, part: Sequence[Record], schema: pa.Schema) -> pa.RecordBatch:
        """Return rows with their problems. Raises CorruptTable where they are not as they were looked at."""
        problems = [each.problem and f"line {each.line} {each.problem}" for each in part]
        make = kinds.text_array if self._format in HEADED else kinds.json_array
        rows = [each.value or {} for each in part]
        try:
            arrays = [make([row.get(name) for row in rows], kind) for name, kind in self.kinds.items()]
        except (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException) as error:
            raise CorruptTable(self._path, self._format, f"its rows changed: {str(error)[:200]}") from error
        arrays += [kinds.own_json([row.get(name) for row in rows]) for name in self.as_json]
        return pa.RecordBatch.from_arrays([*arrays, pa.array(problems, pa.string())], schema=schema)


class _ArrowTable:
    def __init__(self, path: str, source: Any) -> None:
        self._path, self.kinds, self.as_json = path, dict[str, kinds.Kind](), ()
        is_file = source.read_at(6, 0) == b"ARROW1"
        source.seek(0)
        opened: Any = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        self._batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else iter(opened)
        fields = [field.with_type(_plain_type(field.type)) for field in opened.schema]
        self.schema = pa.schema(fields, metadata=opened.schema.metadata)
        for field in self.schema:
            self._try(field)

    def slices(self, most: int | None) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        for batch in self._batches:
            batch.validate(full=True)  # offsets and indices of a file may lead anywhere
            rows = max(1, min(GROUP_ROWS, batch.num_rows * SLICE_BYTES // max(1, batch.nbytes)))
            batch = batch.slice(0, most)
            for start in range(0, batch.num_rows, rows):
                part = batch.slice(start, rows)
                yield part.num_rows, part.nbytes, part
            if most is not None and (most := most - batch.num_rows) <= 0:
                return

    def _try(self, field: pa.Field) -> None:
        """Raise SchemaMismatch for a type that Parquet has not."""
        try:
            pq.write_table(pa.table({field.name: pa.nulls(1, field.type)}), file := io.BytesIO())
            pq.read_table(file)
        except pa.ArrowException:
            what = f"its column {field.name!r} is of type {field.type}, which Parquet has not"
            raise SchemaMismatch(self._path, what) from None

    def check_read(self) -> None:
        """Do nothing: in such a file each row can be read."""

    def look(self, part: pa.RecordBatch) -> None:
        """Do nothing: its schema says what columns hold."""

    def batch(self, part: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        arrays = [column.cast(field.type) for column, field in zip(part.columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered)
    return _PLAIN.get(kind, kind)
