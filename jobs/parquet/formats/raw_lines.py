"""Finds the lines that hold some rows of a text file. The lines are returned as the file has them."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa

from jobs.parquet.formats.converter import codec_of
from jobs.parquet.formats.records import TextFile, csv_records, json_records
from jobs.runs.plans.names import HEADED


def raw_lines(
    path: str, file_format: str, dialect: Mapping[str, str], rows: Collection[int]
) -> dict[int, str]:
    """Return the lines of some rows of a local file, by the rows' numbers. A row of CSV may have several lines.

    Raises OSError, or an InputError for a file that cannot be read.
    """
    # Keys are the line numbers at which rows begin. Values are the numbers of wanted rows. An unwanted row after a
    # wanted row has the value None, because the wanted row ends there.
    row_at_line: dict[int, int | None] = {}
    last_wanted = max(rows, default=-1)
    # Records say on which line a row begins, but do not hold the line. So the file is read once more for the lines.
    with _opened(path, file_format, dialect) as file:
        records = json_records(file)
        if file_format in HEADED:
            _, records = csv_records(file)
        for row, record in enumerate(records):
            if row in rows:
                row_at_line[record.line_number] = row
            elif row - 1 in rows:
                row_at_line[record.line_number] = None
            if row > last_wanted:
                break

    lines_by_row: dict[int, list[str]] = {}
    current_row: int | None = None  # None outside the wanted rows
    with _opened(path, file_format, dialect) as file:
        for line in file.lines():
            if line.line_number in row_at_line:
                current_row = row_at_line[line.line_number]
            if current_row is not None and line.value is not None:
                text = line.value.decode(errors="replace")
                lines_by_row.setdefault(current_row, []).append(text)
    text_by_row = {}
    for row, lines in lines_by_row.items():
        text_by_row[row] = "\n".join(lines).rstrip("\r\n")
    return text_by_row


@contextmanager
def _opened(path: str, file_format: str, dialect: Mapping[str, str]) -> Iterator[TextFile]:
    """Lend an opened text file, compressed or not."""
    with pa.OSFile(path) as source:
        codec = codec_of(source)
        with pa.input_stream(source, codec) as stream:
            yield TextFile(path, file_format, stream, dialect)
