"""What a child does that reads Parquet: it tells what a file holds, and decodes its rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import CorruptParquet, JobsError
from jobs.parquet.files.filesystem import FETCH_BYTES, FetchedFile
from jobs.parquet.files.storage import reading
from jobs.parquet.tables.columns import ColumnChoice
from jobs.parquet.tables.row_groups import GROUP_BYTES, packed, pieces
from sandbox.child import Body, Worker

#: Bytes read at once of all columns: without a limit pyarrow holds a row group's compressed columns.
READ_BYTES = 1 << 24

STATISTICS = b"tokenmill"
Replies = Iterator[tuple[dict[str, Any], Body]]


def with_file(task: Callable[[Mapping[str, Any], Any], Replies]) -> Callable[[Worker], Replies]:
    """Give a child's task its question and the open file. What is wrong with the file is a reply."""

    def do(worker: Worker) -> Replies:
        question = worker.question
        fetched = FetchedFile(lambda at, end: worker.fetch({"at": at, "size": end - at}), question["size"])
        try:
            with reading(question["path"], question["input_format"]), pa.PythonFile(fetched, "r") as source:
                yield from task(question, source)
        except JobsError as error:
            yield {"error": type(error).__name__, "args": error.args}, b""

    return do


@with_file
def look(question: Mapping[str, Any], source: Any) -> Replies:
    with _parquet_file(source) as file:
        footer = file.metadata
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        if any(group.num_rows < 0 for group in groups):
            raise CorruptParquet(question["path"], "a row group has less than no row")
        chunks = (group.column(number) for group in groups for number in range(group.num_columns))
        told = (footer.metadata or {}).get(STATISTICS, b"")
        if told and question["size"] < footer.serialized_size + sum(chunk.total_compressed_size for chunk in chunks):
            raise CorruptParquet(question["path"], "bytes before its footer are gone")
        found = {
            "groups": [(group.num_rows, group.total_byte_size) for group in groups],
            "rows": footer.num_rows,
            "statistics": told.decode(errors="replace"),
        }
        yield found, file.schema_arrow.serialize().to_pybytes()


@with_file
def read(question: Mapping[str, Any], source: Any) -> Replies:
    """Reply a Parquet file's schema, then from a group on batches of `columns`, without the `skip` rows had before."""
    with _parquet_file(source) as file:
        yield {}, file.schema_arrow.serialize().to_pybytes()
        columns, skip = ColumnChoice(*question["columns"]).of(file.schema_arrow.names), question["skip"]
        groups = range(question["first_group"], file.metadata.num_row_groups)
        sizes = ((group.total_byte_size, group.num_rows) for group in map(file.metadata.row_group, groups))
        row_bytes = max((size / max(1, rows) for size, rows in sizes), default=1.0)
        rows = max(1, min(question["rows"], int(GROUP_BYTES / max(1.0, row_bytes))))
        for batch in file.iter_batches(rows, row_groups=groups, columns=columns, use_threads=False):
            for piece in pieces(batch.slice(skip)):
                yield {}, packed(piece)
            skip = max(0, skip - batch.num_rows)


def _parquet_file(source: Any) -> pq.ParquetFile:
    footer = pq.read_metadata(source)
    read_bytes = min(FETCH_BYTES, max(READ_BYTES // max(1, footer.num_columns), 1 << 16))
    return pq.ParquetFile(
        source, metadata=footer, buffer_size=read_bytes, pre_buffer=False, page_checksum_verification=True
    )
