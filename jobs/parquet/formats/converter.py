"""Turns a run's files into Parquet in a child process. `scan` finds out a file's columns, `convert` writes the file.

The columns of a text file are known only once the whole file was read. So there are two passes over the same groups of
rows.
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

#: The most rows, and the most bytes, that are Python objects at the same time.
SLICE_ROWS = 1024
SLICE_BYTES = 1 << 21

MAX_COLUMNS = 10_000
#: If a larger share of rows cannot be read, the file has another format than its name says.
MAX_BAD_SHARE = 0.1
#: A file with fewer rows than these says nothing about its format.
MIN_JUDGED_ROWS = 20

#: How a file is compressed, by the mark at its beginning.
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
_MARK_BYTES = max(map(len, _CODECS))
#: The beginning of one of Arrow's files.
_ARROW_MARK = b"ARROW1"
_BATCH_KINDS: Mapping[str, kinds.Kind] = {"custom_id": "text", "request": "json"}
#: Arrow types that Parquet does not have, and the types that take their place.
_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


@with_file
def scan(question: Mapping[str, Any], source: Any) -> Replies:
    """Reply with a file's schema, its columns' kinds, and the numbers of rows and bytes of its row groups."""
    with _opened(question, source) as table:
        sizes = _sizes_of_slices(table, question["rows"])
        groups = [(rows, size) for rows, size, _ in grouped(sizes)]
        table.check_read()
        packed_schema = table.schema.serialize().to_pybytes()
        yield {"kinds": table.kinds, "groups": groups}, packed_schema


def _sizes_of_slices(table: Any, max_rows: int | None) -> Iterator[tuple[int, int, None]]:
    """Have a table learn its kinds slice by slice; yield each slice's number of rows and number of bytes.

    None stands in place of the slice's rows, so that the rows are not kept in memory.
    """
    for rows, size, part in table.slices(max_rows):
        table.learn_kinds(part)
        yield rows, size, None


@with_file
def convert(question: Mapping[str, Any], source: Any) -> Replies:
    """Reply with a Parquet file, in pieces.

    The question has `rows`, the number of rows to convert, and `kinds`, the kinds of all columns. It also has
    `as_json`: the file gets these columns twice, first with the column's type, then as the JSON text of each value.
    """
    sink = io.BytesIO()
    # `file` must stay a variable of its own: when `file` is deleted, pyarrow closes the sink.
    file = pa.PythonFile(sink, "w")
    with _opened(question, source) as table:
        table.use_columns(dict(question["kinds"]), tuple(question.get("as_json", ())))
        schema = table.schema
        with pq.ParquetWriter(file, schema) as writer:
            slices = table.slices(question["rows"])
            converted_slices = (
                (rows, size, table.batch(part, schema)) for rows, size, part in slices
            )
            # Each group of slices becomes a row group of the file.
            for _, _, batches in grouped(converted_slices):
                writer.write_table(pa.Table.from_batches(batches, schema))
                yield {}, _take_content(sink)
    yield {}, _take_content(sink)  # the footer


def _take_content(sink: io.BytesIO) -> bytes:
    """Return what was written to a sink, and empty it."""
    content = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return content


@contextmanager
def _opened(question: Mapping[str, Any], source: Any) -> Iterator[Any]:
    """Lend the table that a question is about. source: the file, from its beginning."""
    path = question["path"]
    file_format = question["input_format"]
    dialect = question.get("dialect", {})
    if file_format == ARROW:
        yield _ArrowTable(path, source)
        return
    with pa.input_stream(source, codec_of(source)) as stream:
        text_file = TextFile(path, file_format, stream, dialect)
        yield _TextTable(text_file, decimal=dialect.get("decimal", "."))


def codec_of(source: Any) -> str | None:
    """Return how a file is compressed, by its first bytes; None if it is not compressed."""
    head = source.read_at(_MARK_BYTES, 0)
    source.seek(0)
    for mark, codec in _CODECS.items():
        if head.startswith(mark):
            return codec
    return None


class _TextTable:
    """The rows of a text file, and the kinds of its columns as far as they are known."""

    def __init__(self, file: TextFile, decimal: str) -> None:
        self._file = file
        self._decimal = decimal
        self._path = file.path
        self._format = file.format
        self._num_rows = 0
        self._num_bad = 0
        self._first_bad: Record | None = None
        self.as_json: Sequence[str] = ()
        #: The kinds of the columns, by name; "null" for a column without a value so far.
        self.kinds: dict[str, kinds.Kind] = {}
        if file.format in HEADED:
            names, self._records = csv_records(file)
            self.kinds = dict.fromkeys(names, "null")
            self._check_names()
        else:
            self._records = json_records(file)
            if file.format == OPENAI_BATCH:
                self.kinds = dict(_BATCH_KINDS)

    def use_columns(self, column_kinds: dict[str, kinds.Kind], as_json: Sequence[str]) -> None:
        """Take the kinds that the plan has for the columns.

        as_json: the columns for which an extra column holds the JSON text of each row's value.
        """
        self.kinds = column_kinds
        self.as_json = as_json

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the Parquet file."""
        fields = [kinds.arrow_field(name, kind) for name, kind in self.kinds.items()]
        json_fields = [pa.field(AS_JSON + name, pa.string()) for name in self.as_json]
        return pa.schema([*fields, *json_fields, PROBLEM_FIELD])

    def slices(self, max_rows: int | None) -> Iterator[tuple[int, int, list[Record]]]:
        """Yield the first `max_rows` rows, or all rows, in slices: (number of rows, number of bytes, the rows)."""
        records: list[Record] = []
        size = 0
        for record in islice(self._records, max_rows):
            records.append(record)
            size += record.size
            self._count(record)
            if len(records) == SLICE_ROWS or size > SLICE_BYTES:
                yield len(records), size, records
                records = []
                size = 0
        if records:
            yield len(records), size, records

    def _count(self, record: Record) -> None:
        """Count a record for `check_read`, and remember the first bad one."""
        self._num_rows += 1
        if record.problem:
            self._num_bad += 1
            if self._first_bad is None:
                self._first_bad = record

    def check_read(self) -> None:
        """Raise TooManyBadLines if too many lines could not be read, or OtherEncoding if they seem not to be UTF-8."""
        self._file.check_encoding()
        first_bad = self._first_bad
        if first_bad is None or self._num_bad <= self._num_rows * MAX_BAD_SHARE:
            return
        has_no_row = not self.kinds  # a file of JSON lines has no columns until a row was read
        if self._num_rows >= MIN_JUDGED_ROWS or has_no_row:
            raise TooManyBadLines(
                self._path, self._num_bad, self._num_rows, first_bad.line_number, first_bad.problem
            )

    def learn_kinds(self, records: Sequence[Record]) -> None:
        """Merge the kinds of some rows' values into the columns' kinds. A batch file's columns have fixed kinds."""
        if self._format in HEADED:
            self._learn_from_fields(records)
        elif self._format != OPENAI_BATCH:
            self._learn_from_json(records)

    def _learn_from_fields(self, records: Sequence[Record]) -> None:
        """Merge the kinds of a CSV file's fields into the kinds of the columns."""
        rows = [record.value for record in records if record.value is not None]
        for name, known_kind in self.kinds.items():
            if known_kind != "text":  # text stays text
                kind = kinds.kind_of_texts([row[name] for row in rows], self._decimal)
                self.kinds[name] = kinds.merged_texts(known_kind, kind)

    def _learn_from_json(self, records: Sequence[Record]) -> None:
        """Merge the kinds of the values in JSON lines into the kinds of the columns."""
        for record in records:
            for name, value in (record.value or {}).items():
                known_kind = self.kinds.get(name, "null")
                is_text_again = known_kind == "text" and isinstance(value, str)
                if known_kind == "json" or is_text_again:
                    continue  # the value cannot change the kind
                self.kinds[name] = kinds.merged(known_kind, kinds.kind_of(value))
        self._check_names()

    def _check_names(self) -> None:
        """Raise SchemaMismatch for a column name that is reserved, or CorruptTable for too many columns."""
        for name in self.kinds:
            if name == PROBLEM or name.startswith(AS_JSON):
                raise SchemaMismatch(self._path, f"a column is named {brief(name)}")
        if len(self.kinds) > MAX_COLUMNS:
            raise CorruptTable(
                self._path, self._format, f"it names more than {MAX_COLUMNS} columns"
            )

    def batch(self, records: Sequence[Record], schema: pa.Schema) -> pa.RecordBatch:
        """Return rows as Arrow columns, with a column of their problems.

        Raises CorruptTable if the file has changed, so that values no longer have their kinds.
        """
        problems: list[str | None] = []
        for record in records:
            if record.problem is None:
                problems.append(None)
            else:
                problems.append(f"line {record.line_number} {record.problem}")
        make_array = kinds.text_array if self._format in HEADED else kinds.json_array
        rows = [record.value or {} for record in records]
        try:
            arrays = []
            for name, kind in self.kinds.items():
                arrays.append(make_array([row.get(name) for row in rows], kind))
        except (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException) as error:
            raise CorruptTable(
                self._path, self._format, f"its rows changed: {str(error)[:200]}"
            ) from error
        for name in self.as_json:
            arrays.append(kinds.own_json([row.get(name) for row in rows]))
        arrays.append(pa.array(problems, pa.string()))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _ArrowTable:
    """The rows of one of Arrow's files. The file's schema gives the columns' types, so no kinds are needed."""

    def __init__(self, path: str, source: Any) -> None:
        """Read the file's schema. Raises SchemaMismatch for a column whose type Parquet does not have."""
        self._path = path
        self.kinds: dict[str, kinds.Kind] = {}
        head = source.read_at(len(_ARROW_MARK), 0)
        is_file = head == _ARROW_MARK  # otherwise the source is one of Arrow's streams
        source.seek(0)
        opened: Any
        self._batches: Iterator[pa.RecordBatch]
        if is_file:
            opened = pa.ipc.open_file(source)
            self._batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            opened = pa.ipc.open_stream(source)
            self._batches = iter(opened)
        fields = [field.with_type(_plain_type(field.type)) for field in opened.schema]
        self.schema = pa.schema(fields, metadata=opened.schema.metadata)
        for field in self.schema:
            self._check_type(field)

    def use_columns(self, column_kinds: dict[str, kinds.Kind], as_json: Sequence[str]) -> None:
        """Do nothing: the schema says what the columns hold."""

    def slices(self, max_rows: int | None) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Yield the first `max_rows` rows, or all rows, in slices: (number of rows, number of bytes, the rows)."""
        rows_left = max_rows
        for batch in self._batches:
            batch.validate(full=True)  # in a damaged file, offsets and indices may point anywhere
            rows_in_slice_bytes = batch.num_rows * SLICE_BYTES // max(1, batch.nbytes)
            slice_rows = max(1, min(GROUP_ROWS, rows_in_slice_bytes))
            wanted = batch.slice(0, rows_left)  # the whole batch if rows_left is None
            for start in range(0, wanted.num_rows, slice_rows):
                part = wanted.slice(start, slice_rows)
                yield part.num_rows, part.nbytes, part
            if rows_left is not None:
                rows_left -= wanted.num_rows
                if rows_left <= 0:
                    return

    def _check_type(self, field: pa.Field) -> None:
        """Raise SchemaMismatch for a type that Parquet does not have."""
        # pyarrow raises its error only when it writes or reads a column of this type, so a single null is tried here.
        file = io.BytesIO()
        try:
            pq.write_table(pa.table({field.name: pa.nulls(1, field.type)}), file)
            pq.read_table(file)
        except pa.ArrowException:
            problem = (
                f"its column {field.name!r} has type {field.type}, which Parquet does not have"
            )
            raise SchemaMismatch(self._path, problem) from None

    def check_read(self) -> None:
        """Do nothing: each row of such a file can be read."""

    def learn_kinds(self, part: pa.RecordBatch) -> None:
        """Do nothing: the schema says what the columns hold."""

    def batch(self, part: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Return rows with the types of `schema`."""
        arrays = [
            column.cast(field.type) for column, field in zip(part.columns, schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return a type that Parquet has for values of this type. Most types are returned unchanged."""
    if pa.types.is_dictionary(arrow_type):
        value_type = _plain_type(arrow_type.value_type)
        return pa.dictionary(arrow_type.index_type, value_type, arrow_type.ordered)
    return _PLAIN.get(arrow_type, arrow_type)
