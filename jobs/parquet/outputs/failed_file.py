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
    Each written row has those input columns that are also in the output, its number in the run, its file, its number in
    that file, and the reason why it failed. A row of a text file also has its line, if the planned file is on this
    machine and has not changed. CSV is written with the delimiter, decimal mark and encoding of the run's input.
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


#: A file of failed rows has no columns of answers.
_NO_ANSWER_COLUMNS: frozenset[str] = frozenset()


def _write_csv(sink: Any, table: pa.Table, dialect: Mapping[str, str]) -> None:
    """Write a table of failed rows as CSV."""
    write_csv(_NO_ANSWER_COLUMNS, sink, table.schema, iter(table.to_batches()), dialect)


def _write_jsonl(sink: Any, table: pa.Table, dialect: Mapping[str, str]) -> None:
    """Write a table of failed rows as lines of JSON. JSON has no dialect, so `dialect` is not read."""
    write_jsonl(_NO_ANSWER_COLUMNS, sink, table.schema, iter(table.to_batches()))


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
        failed_rows = list(reader.failed_rows(shard, cut))
        if failed_rows:
            failed_by_shard[shard] = failed_rows

    # The input's lines are looked up for all parts at once, so that each text file is read once.
    all_lines = _lines(plan, chain.from_iterable(failed_by_shard.values()))
    for shard, failed_rows in failed_by_shard.items():
        first_row = plan.first_row(shard)
        numbers_in_part = [failed.row - first_row for failed in failed_rows]
        table = reader.part_table(shard).take(numbers_in_part)
        input_columns = [name for name in table.column_names if name not in answer_columns]
        table = table.select(input_columns)
        lines = [all_lines.get((failed.file, failed.file_row)) for failed in failed_rows]
        for name, column in _added_columns(failed_rows, lines).items():
            free_name = name
            while free_name in table.column_names:  # the input has a column of this name
                free_name += "_"
            table = table.append_column(free_name, column)
        yield table


def _added_columns(
    failed_rows: Sequence[FailedRow], lines: Sequence[str | None]
) -> dict[str, pa.Array]:
    """Return the columns, by name, that say where failed rows are and why they failed.

    lines: the line of each failed row, or None.
    """
    return {
        "row": pa.array([failed.row for failed in failed_rows], pa.int64()),
        "file": pa.array([failed.file for failed in failed_rows], pa.string()),
        "file_row": pa.array([failed.file_row for failed in failed_rows], pa.int64()),
        "reason": pa.array([failed.reason for failed in failed_rows], pa.string()),
        "line": pa.array(lines, pa.string()),
    }


def _lines(plan: Plan, failed_rows: Iterable[FailedRow]) -> dict[tuple[str, int], str]:
    """Return the lines of failed rows. The keys are a file's path and the row's number in this file.

    Lines of files in stores are left out, and so are lines of files that have changed or cannot be read.
    """
    if plan.input_format not in LINES:
        return {}
    rows_by_file: dict[str, set[int]] = defaultdict(set)
    for failed in failed_rows:
        rows_by_file[failed.file].add(failed.file_row)
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
