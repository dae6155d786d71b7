"""Writes the rows that failed into a file of their own, for the person who mends them."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InputError, InvalidJob
from jobs.parquet.formats.raw_lines import raw_lines
from jobs.parquet.outputs.output_file import write_csv, write_jsonl
from jobs.parquet.outputs.part import answer_names
from jobs.parquet.outputs.read_back import FailedRow, FolderReader
from jobs.runs.plans.names import LINES
from jobs.runs.plans.paths import is_stored
from jobs.runs.plans.plan import Plan


def export_failed(reader: FolderReader, path: str, *, cut: bool = False) -> int:
    """Write the rows with an error into a new file, and return how many there are. Raises InvalidJob, PartDamaged.

    path: ends in .parquet, .csv or .jsonl. cut: whether rows whose answer was cut are written too.
    A row has the input's columns that the output has, its number in the run, its file, its number in the file, and the
    reason. A row of a text file also has its line, if the planned file is on this machine and has not changed. CSV has
    the delimiter, decimal mark and encoding of the run's input.
    """
    suffix = os.path.splitext(path)[1]
    if suffix not in _WRITERS:
        raise InvalidJob(f"{path} ends in no known format: expected {', '.join(_WRITERS)}")
    tables = list(_tables(reader, cut))
    if not tables:
        return 0
    write = _WRITERS[suffix]
    try:
        with open(path, "xb") as sink:
            write(sink, pa.concat_tables(tables), reader.plan.spec.dialect)
    except FileExistsError:
        raise InvalidJob(f"{path} is there already: name a new file") from None
    except OSError as error:
        raise InvalidJob(f"{path} cannot be written: {error.strerror}") from None
    return sum(table.num_rows for table in tables)


#: The columns of answers that a file of failed rows has: none.
_NO_ANSWERS: frozenset[str] = frozenset()


def _write_csv(sink: Any, table: pa.Table, dialect: Mapping[str, str]) -> None:
    """Write a table as CSV."""
    write_csv(_NO_ANSWERS, sink, table.schema, iter(table.to_batches()), dialect)


def _write_jsonl(sink: Any, table: pa.Table, dialect: Mapping[str, str]) -> None:
    """Write a table as lines of JSON."""
    write_jsonl(_NO_ANSWERS, sink, table.schema, iter(table.to_batches()))


_WRITERS: dict[str, Callable[[Any, pa.Table, Mapping[str, str]], None]] = {
    ".parquet": lambda sink, table, dialect: pq.write_table(table, sink),
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def _tables(reader: FolderReader, cut: bool) -> Iterator[pa.Table]:
    """Yield a table for each part that has failed rows. cut: whether rows with a cut answer count as failed."""
    plan = reader.plan
    answer_columns = set(answer_names(plan.spec))
    failed_by_shard: dict[int, list[FailedRow]] = {}
    for shard in reader.shards():
        failed = list(reader.failed_rows(shard, cut))
        if failed:
            failed_by_shard[shard] = failed

    all_lines = _lines(plan, chain.from_iterable(failed_by_shard.values()))
    for shard, failed in failed_by_shard.items():
        first_row = plan.first_row(shard)
        numbers_in_part = [row.row - first_row for row in failed]
        rows = reader.part_table(shard).take(numbers_in_part)
        table = rows.select([name for name in rows.column_names if name not in answer_columns])
        lines = [all_lines.get((row.file, row.file_row)) for row in failed]
        for name, column in _added_columns(failed, lines).items():
            while name in table.column_names:  # the input has a column of this name
                name += "_"
            table = table.append_column(name, column)
        yield table


def _added_columns(failed: Sequence[FailedRow], lines: Sequence[str | None]) -> dict[str, pa.Array]:
    """Return the columns, by name, that say where failed rows are and why they failed. lines: None for no line."""
    return {
        "row": pa.array([row.row for row in failed], pa.int64()),
        "file": pa.array([row.file for row in failed], pa.string()),
        "file_row": pa.array([row.file_row for row in failed], pa.int64()),
        "reason": pa.array([row.reason for row in failed], pa.string()),
        "line": pa.array(lines, pa.string()),
    }


def _lines(plan: Plan, failed: Iterable[FailedRow]) -> dict[tuple[str, int], str]:
    """Return the lines of failed rows, by file and row of the file.

    Lines of files in stores are left out, and so are lines of files that have changed or cannot be read.
    """
    if plan.input_format not in LINES:
        return {}
    rows_by_file: dict[str, set[int]] = defaultdict(set)
    for row in failed:
        rows_by_file[row.file].add(row.file_row)
    lines = {}
    for file in plan.files:
        if file.path not in rows_by_file or is_stored(file.path):
            continue
        with suppress(OSError, InputError):
            if os.path.getsize(file.path) != file.size:
                continue
            file_lines = raw_lines(
                file.path, plan.input_format, plan.spec.dialect, rows_by_file[file.path]
            )
            for file_row, text in file_lines.items():
                lines[file.path, file_row] = text
    return lines
