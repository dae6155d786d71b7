"""Writes the output of a run that asks for one file: the rows of all parts in order, once all parts are there."""

import base64
import codecs
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from jobs.common.display import to_json
from jobs.errors import CorruptParquet, PartDamaged, TableNotRead
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.part import answer_names, without_own_keys
from jobs.parquet.tables.columns import (
    ALL_COLUMNS,
    ROW_NUMBER,
    ColumnChoice,
    RowProblem,
    as_written,
    row_values,
)
from jobs.parquet.tables.row_groups import RowBuckets, write_groups
from jobs.parquet.tables.table_reading import TableReading
from jobs.prompts.batch_lines import output_line
from jobs.runs.plans.names import ARROW, CSV, JSONL, OPENAI_BATCH, PARQUET, output_names
from jobs.runs.plans.plan import Plan
from jobs.runs.statistics.run_statistics import CUT

Batches = Iterator[pa.RecordBatch]


def write_output(storage: Storage, plan: Plan, name: str, sink: Any) -> None:
    """Write the rows of all parts into one file. Raises PartDamaged.

    name: the file's name. The output of an OpenAI batch is two files: one for answers, one for errors.
    """
    assert plan.spec.single_file is not None
    answer_columns = frozenset(answer_names(plan.spec))
    writers: dict[str, Callable[[Any, pa.Schema, Batches], object]] = {
        PARQUET: write_groups,
        ARROW: _write_arrow,
        CSV: partial(write_csv, answer_columns),
        JSONL: partial(write_jsonl, answer_columns),
        OPENAI_BATCH: partial(_write_batch_lines, plan.run, _is_error_file(name)),
    }
    with open_part(storage, plan, 0) as part:
        schema = without_own_keys(part.schema)
    with closing(_rows_in_order(storage, plan)) as batches:
        writers[plan.spec.single_file](sink, schema, batches)


def _is_error_file(name: str) -> bool:
    """Whether this is the name of an OpenAI batch's error file."""
    _, error_name = output_names(OPENAI_BATCH)
    return name == error_name


def _write_batch_lines(
    run: str, is_error_file: bool, sink: Any, schema: pa.Schema, batches: Batches
) -> None:
    """Write one of the two output files of an OpenAI batch. Its lines have a fixed form, so `schema` is not read."""
    first_row = 0  # the number of the batch's first row in the run
    for batch in batches:
        sink.write(_batch_lines(run, is_error_file, first_row, batch))
        first_row += batch.num_rows


def _batch_lines(
    run: str, is_error_file: bool, first_row: int, batch: pa.RecordBatch | pa.Table
) -> bytes:
    """Return rows as lines of an OpenAI batch's answer file or error file. Rows of the other file are left out.

    is_error_file: True to take the rows with an error, False to take the rows without an error. first_row: the number
    that the batch's first row has in the run.
    """
    lines = []
    rows = batch.select(["custom_id", "completion", "error"]).to_pylist()
    for number, row in enumerate(rows, first_row):
        has_error = row["error"] is not None
        if has_error == is_error_file:
            line = output_line(run, number, row["custom_id"], row["completion"], row["error"])
            lines.append(line)
    return _json_lines(lines)


def write_lines_of_parts(
    storage: Storage, plan: Plan, shards: Iterable[int], name: str, sink: Any
) -> int:
    """Write the parts of an OpenAI batch as lines of its output; return the number of written bytes.

    shards: the shards that have a part. name: the file's name, see `write_output`. Raises PartDamaged.
    """
    is_error_file = _is_error_file(name)
    num_bytes = 0
    for shard in shards:
        first_row = plan.first_row(shard)
        with open_part(storage, plan, shard) as part:
            for batch in part.batches:
                lines = _batch_lines(plan.run, is_error_file, first_row, batch)
                num_bytes += sink.write(lines)
                first_row += batch.num_rows
    return num_bytes


def _part_rows(storage: Storage, plan: Plan) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of all parts, in the parts' order."""
    for shard in range(len(plan.shards)):
        with open_part(storage, plan, shard) as file:
            for batch in file.batches:
                storage.check_interrupted()
                yield batch


def _rows_in_order(storage: Storage, plan: Plan) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of all parts, in the input's order."""
    if plan.spec.order is None:
        yield from _part_rows(storage, plan)
        return
    with RowBuckets(plan.rows) as buckets, closing(_part_rows(storage, plan)) as rows:
        for batch in rows:
            buckets.add(batch.column(ROW_NUMBER).to_numpy(), batch)
        for table in buckets.sorted():
            yield from table.to_batches()


@contextmanager
def open_part(
    storage: Storage, plan: Plan, shard: int, columns: ColumnChoice = ALL_COLUMNS
) -> Iterator[TableReading]:
    """Lend a part that can be read once. Raises PartDamaged, now or while the batches are read."""
    path = plan.part_path(shard)
    try:
        with closing(TableReading(storage, path, columns)) as reading:
            yield reading
    except (CorruptParquet, TableNotRead) as error:
        reason = error.argument("reason")
        raise PartDamaged(path, f"not readable as Parquet: {reason}") from error


def part_rows(
    storage: Storage, plan: Plan, shard: int, columns: Sequence[str], only: Set[int] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a part, with their numbers in the run. Raises PartDamaged.

    only: the numbers of the rows to yield; None for all rows.
    """
    start = plan.first_row(shard)
    with open_part(storage, plan, shard, ColumnChoice(tuple(columns))) as file:
        missing_columns = set(columns) - set(file.schema.names)
        if missing_columns:
            raise PartDamaged(plan.part_path(shard), f"it has no column {min(missing_columns)!r}")
        for batch in file.batches:
            storage.check_interrupted()
            numbers: Sequence[int] = range(start, start + batch.num_rows)
            start += batch.num_rows
            if only is not None:
                indices = [index for index, number in enumerate(numbers) if number in only]
                numbers = [numbers[index] for index in indices]
                batch = batch.take(pa.array(indices, pa.int64()))
            yield from zip(numbers, batch.to_pylist(), strict=True)


def _write_arrow(sink: Any, schema: pa.Schema, batches: Batches) -> None:
    """Write rows as an Arrow file."""
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def write_jsonl(answer_columns: Set[str], sink: Any, schema: pa.Schema, batches: Batches) -> None:
    """Write rows as lines of JSON. answer_columns: see _rows."""
    for batch in batches:
        lines = []
        for row in _rows(batch, answer_columns):
            values_by_column = dict(zip(schema.names, row, strict=True))
            lines.append(to_json(values_by_column))
        sink.write(_json_lines(lines))


#: Characters that some readers take for the end of a line. JSON can write them as escapes.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def _json_lines(lines: Iterable[str]) -> bytes:
    """Return lines of JSON as the bytes of a file."""
    ended_lines = [f"{line.translate(_LINE_ENDS)}\n" for line in lines]
    return "".join(ended_lines).encode()


def write_csv(
    answer_columns: Set[str],
    sink: Any,
    schema: pa.Schema,
    batches: Batches,
    dialect: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write rows as CSV. Fields that some readers would take for several lines are quoted.

    answer_columns: see _rows. dialect: see RunSpec.dialect. Characters that the encoding lacks become escapes.
    """
    delimiter = dialect.get("delimiter", ",")
    decimal = dialect.get("decimal", ".")
    make_encoder = codecs.getincrementalencoder(dialect.get("encoding", "utf-8"))
    encoder = make_encoder(errors="backslashreplace")
    header = _csv_lines([schema.names], delimiter, decimal)
    sink.write(encoder.encode(header))
    for batch in batches:
        lines = _csv_lines(_rows(batch, answer_columns), delimiter, decimal)
        sink.write(encoder.encode(lines))


def _csv_lines(rows: Iterable[Sequence[Any]], delimiter: str, decimal: str) -> str:
    """Return rows as the text of a CSV file."""
    # A field that begins with sep= is quoted, because Excel takes such a line for one that names the delimiter.
    needs_quotes = re.compile(f"[{_QUOTED}{re.escape(delimiter)}]|^sep=")
    lines = []
    for row in rows:
        line = delimiter.join(_field(value, needs_quotes, decimal) for value in row)
        if not line:
            line = '""'  # readers skip blank lines
        lines.append(f"{line}\n")
    return "".join(lines)


#: Characters that some readers take for the end of a line or field, or for the mark at a file's beginning. A field with
#: one of them is quoted.
_QUOTED = '"\n\r\v\f\x1c-\x1e\x85\u2028\u2029\ufeff'


def _rows(batch: pa.RecordBatch, answer_columns: Set[str]) -> Iterator[Sequence[Any]]:
    """Yield a batch's rows, with values that JSON can hold. A value that Python cannot hold becomes null.

    answer_columns: the names of the columns of answers. These columns have no limit of size.
    """
    values_by_column = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_temporal(column.type) or pa.types.is_decimal(column.type):
            # Arrow's text has all digits of the value. Python's types may hold fewer.
            column = column.cast(pa.string())
        values = row_values(name, column, are_answers=name in answer_columns)
        values_by_column.append(as_written(batch.schema.field(name), values))
    for row in zip(*values_by_column, strict=True):
        yield [None if isinstance(value, RowProblem) else _plain(value) for value in row]


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON has. A number that JSON cannot write becomes null."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value)


def _field(value: Any, needs_quotes: re.Pattern[str], decimal: str) -> str:
    """Return a value as a field of CSV. needs_quotes: a pattern found in each text that must be quoted."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value if isinstance(value, str) else to_json(value)
    if isinstance(value, float):
        text = text.replace(".", decimal)
    if not needs_quotes.search(text):
        return text
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


def failed_rows(
    storage: Storage, plan: Plan, shard: int, with_cut: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield the failed rows of a part: each row's number in the run, and its error. Raises PartDamaged.

    with_cut: whether to yield rows with a cut answer as well, with CUT in place of an error.
    """
    error_column = f"{plan.spec.output_prefix}error"
    finish_columns = []
    if with_cut:
        finish_columns = [
            name for name in answer_names(plan.spec) if name.endswith("finish_reason")
        ]
    for row, values in part_rows(storage, plan, shard, [error_column, *finish_columns]):
        if values[error_column] is not None:
            yield row, str(values[error_column])
        elif any(_is_cut(values[name]) for name in finish_columns):
            yield row, CUT


def _is_cut(finish_reason: str | list[str] | None) -> bool:
    """Whether an answer, or one of a row's several answers, was cut at its limit of tokens."""
    reasons = finish_reason if isinstance(finish_reason, list) else [finish_reason]
    return "length" in reasons
