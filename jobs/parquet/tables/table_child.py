"""Reads Parquet in a child process: says what a file holds, and decodes its rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import CorruptParquet, JobsError
from jobs.parquet.files.filesystem import FETCH_BYTES, FetchedFile
from jobs.parquet.files.storage import reading
from jobs.parquet.tables.columns import ColumnChoice
from jobs.parquet.tables.row_groups import GROUP_BYTES, packed, pieces
from sandbox.child import Body, Worker

#: The most bytes that are read at once, of all columns together. Without a limit, pyarrow holds all compressed columns
#: of a row group.
READ_BYTES = 1 << 24
#: The fewest bytes of a column that are read at once.
MIN_COLUMN_BYTES = 1 << 16

#: The key of a part's statistics in the metadata of its footer.
STATISTICS = b"tokenmill"
Replies = Iterator[tuple[dict[str, Any], Body]]


def with_file(task: Callable[[Mapping[str, Any], Any], Replies]) -> Callable[[Worker], Replies]:
    """Turn a function that takes a question and an open file into a child's task. Its JobsErrors become replies."""

    def do(worker: Worker) -> Replies:
        """Answer the worker's question about a file, whose bytes the worker sends."""
        question = worker.question

        def fetch(start: int, end: int) -> bytes | bytearray:
            """Ask the worker for a range of the file's bytes."""
            return worker.fetch({"at": start, "size": end - start})

        fetched_file = FetchedFile(fetch, question["size"])
        try:
            with (
                reading(question["path"], question["input_format"]),
                pa.PythonFile(fetched_file, "r") as source,
            ):
                yield from task(question, source)
        except JobsError as error:
            yield {"error": type(error).__name__, "args": error.args}, b""

    return do


@with_file
def look(question: Mapping[str, Any], source: Any) -> Replies:
    """Reply with a Parquet file's schema and its row groups, and with a part's statistics if the file is a part."""
    with _parquet_file(source) as file:
        footer = file.metadata
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        if any(group.num_rows < 0 for group in groups):
            raise CorruptParquet(question["path"], "a row group has a negative number of rows")
        statistics = (footer.metadata or {}).get(STATISTICS, b"")
        least_bytes = footer.serialized_size + _compressed_bytes(groups)
        # Only parts are checked. Other writers may state sizes that are wrong, or write a shorter footer than pyarrow.
        is_part = bool(statistics)
        if is_part and question["size"] < least_bytes:
            raise CorruptParquet(question["path"], "bytes before its footer are gone")
        contents = {
            "groups": [(group.num_rows, group.total_byte_size) for group in groups],
            "rows": footer.num_rows,
            "statistics": statistics.decode(errors="replace"),
        }
        yield contents, file.schema_arrow.serialize().to_pybytes()


def _compressed_bytes(groups: Sequence[Any]) -> int:
    """Return the bytes that row groups take in their file."""
    num_bytes = 0
    for group in groups:
        for number in range(group.num_columns):
            num_bytes += group.column(number).total_compressed_size
    return num_bytes


@with_file
def read(question: Mapping[str, Any], source: Any) -> Replies:
    """Reply with a Parquet file's schema, then with batches of its rows.

    The question has `columns`, the columns to read; `first_group`, the row group with which to begin; `skip`, how many
    rows to leave out, because an earlier child has sent them; and `rows`, the most rows of a batch.
    """
    with _parquet_file(source) as file:
        yield {}, file.schema_arrow.serialize().to_pybytes()
        columns = ColumnChoice(*question["columns"]).chosen_from(file.schema_arrow.names)
        rows_to_skip = question["skip"]
        groups = range(question["first_group"], file.metadata.num_row_groups)
        # The row group whose rows are largest on average decides how many rows a batch may have.
        max_row_bytes = 1.0
        for number in groups:
            group = file.metadata.row_group(number)
            average_row_bytes = group.total_byte_size / max(1, group.num_rows)
            max_row_bytes = max(max_row_bytes, average_row_bytes)
        rows_that_fit = int(GROUP_BYTES / max_row_bytes)
        batch_rows = max(1, min(question["rows"], rows_that_fit))
        batches = file.iter_batches(
            batch_rows, row_groups=groups, columns=columns, use_threads=False
        )
        for batch in batches:
            for piece in pieces(batch.slice(rows_to_skip)):  # no piece if all rows are skipped
                yield {}, packed(piece)
            rows_to_skip = max(0, rows_to_skip - batch.num_rows)


def _parquet_file(source: Any) -> pq.ParquetFile:
    """Open a Parquet file so that it reads few bytes of each column at once."""
    footer = pq.read_metadata(source)
    share_of_column = READ_BYTES // max(1, footer.num_columns)
    column_bytes = max(share_of_column, MIN_COLUMN_BYTES)
    return pq.ParquetFile(
        source,
        metadata=footer,
        buffer_size=min(column_bytes, FETCH_BYTES),
        pre_buffer=False,
        page_checksum_verification=True,
    )
