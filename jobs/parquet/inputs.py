"""A run's input files: what their footers say, and whether they are still those that were planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..context.shard_bytes import DEFAULT_BYTES
from ..errors import ColumnConflict, InputChanged, InputNotFound, SchemaMismatch
from ..runs.partitions import AddedColumn, FoundFile, partition_columns
from ..runs.plan import PlannedFile
from .added_columns import with_added_fields
from .fingerprint import file_fingerprint
from .footer import MAX_FOOTER_BYTES, check_footer
from .footer_cost import MAX_FOOTER_ITEMS
from .storage import FileStat, Storage, reading

#: Bytes read at once of each column: without a limit pyarrow holds a whole row group's compressed columns.
READ_BYTES = 1 << 16

#: Gives the fingerprint of one file in a state of it.
Fingerprint = Callable[[FileStat], str]


@dataclass(frozen=True)
class Inputs:
    """What planning knows of a run's input.

    row_groups: for each file the rows of each of its row groups. file_schema: of every one of the files.
    added_columns: what comes behind its columns, of the names of folders and files.
    """

    files: tuple[PlannedFile, ...]
    row_groups: tuple[tuple[int, ...], ...]
    file_schema: pa.Schema
    added_columns: tuple[AddedColumn, ...]

    @property
    def schema(self) -> pa.Schema:
        """All columns that a template may name, in the order in which the output has them."""
        return with_added_fields(self.file_schema, self.added_columns)


def read_inputs(
    storage: Storage,
    found: Sequence[FoundFile],
    filename_column: str | None,
    check_interrupted: Callable[[], None],
    limit: int = DEFAULT_BYTES,
    max_rows: int | None = None,
) -> Inputs:
    """Read the footer and the fingerprint of each file.

    check_interrupted: called before each file; what it raises ends the reading. limit: see parquet_file.
    max_rows: files behind that many rows are left out, and not looked at.
    Raises CorruptParquet, FooterTooLarge, SchemaMismatch when the files differ, or ColumnConflict for the
    filename column.
    """
    schema, columns, rows = read_columns(storage, found, filename_column, limit)
    files, row_groups = [], []
    for each in found:
        check_interrupted()
        file, groups, own = _read_footer(storage, each.path, limit)
        if not own.equals(schema):
            raise SchemaMismatch(each.path, f"its columns are {_columns(own, schema)}")
        files.append(file)
        row_groups.append(groups)
        if max_rows is not None and (max_rows := max_rows - file.rows) <= 0:
            break
    files = [replace(file, values=tuple(values)) for file, values in zip(files, rows, strict=False)]
    return Inputs(tuple(files), tuple(row_groups), schema, tuple(columns))


def read_columns(
    storage: Storage, found: Sequence[FoundFile], filename_column: str | None, limit: int = DEFAULT_BYTES
) -> tuple[pa.Schema, list[AddedColumn], list[list[Any]]]:
    """Read the first file's footer; return its schema, the added columns, and each file's values in them.

    limit: see parquet_file. Raises CorruptParquet, FooterTooLarge, SchemaMismatch when the folders differ, or
    ColumnConflict for the filename column.
    """
    *_, schema = _read_footer(storage, found[0].path, limit)
    columns, rows = partition_columns(found, schema.names)
    if filename_column is not None:
        if filename_column in (*schema.names, *(column.name for column in columns)):
            raise ColumnConflict(filename_column, "give filename_column another name")
        columns.append(AddedColumn(filename_column, "string"))
        rows = [[*values, each.path] for values, each in zip(rows, found, strict=True)]
    return schema, columns, rows


@contextmanager
def unchanged(storage: Storage, file: PlannedFile, fingerprint: Fingerprint) -> Iterator[None]:
    """Raise InputChanged when a file is not the one that was planned, or no longer when the body ends.

    fingerprint: gives that of the file in the state that is named; it is asked for only where a file of the
    planned size has another modification time.
    """
    _check_unchanged(storage, file, fingerprint)
    try:
        yield
    finally:  # a file that was replaced meanwhile explains whatever else went wrong
        _check_unchanged(storage, file, fingerprint)


def _check_unchanged(storage: Storage, file: PlannedFile, fingerprint: Fingerprint) -> None:
    stat = storage.stat(file.path)
    if stat is None:
        raise InputChanged(file.path, storage.what_is_there(file.path))
    if stat.size != file.size:
        raise InputChanged(file.path, f"planned {file.size} bytes, found {stat.size}")
    if stat.mtime_ns != file.mtime_ns and fingerprint(stat) != file.fingerprint:
        raise InputChanged(file.path, f"it has the same {file.size} bytes, but other contents")


@contextmanager
def open_parquet(storage: Storage, path: str, limit: int = DEFAULT_BYTES) -> Iterator[Any]:
    """Open a file as pyarrow's ParquetFile; what the body reads from it raises CorruptParquet as well.

    limit: see parquet_file.
    """
    with open_source(storage, path, limit=limit) as (_, file):
        yield file


@contextmanager
def open_source(
    storage: Storage, path: str, footer: Any = None, limit: int = DEFAULT_BYTES
) -> Iterator[tuple[Any, Any]]:
    """Open a file as open_parquet does; yield it as it is, too. footer, limit: see parquet_file."""
    with reading(path), storage.open_input(path) as source, parquet_file(path, source, footer, limit) as file:
        yield source, file


@contextmanager
def parquet_file(path: str, source: Any, footer: Any = None, limit: int = DEFAULT_BYTES) -> Iterator[Any]:
    """Read what is open at a path as pyarrow's ParquetFile.

    footer: the file's FileMetaData where it was parsed before. limit: bytes that one takes in memory.
    Raises FooterTooLarge beyond it, CorruptParquet, and whatever pyarrow raises.
    """
    if footer is None:
        check_footer(path, source, limit)
    with pq.ParquetFile(
        source,
        metadata=footer,
        buffer_size=READ_BYTES,
        pre_buffer=False,
        thrift_string_size_limit=MAX_FOOTER_BYTES,
        thrift_container_size_limit=MAX_FOOTER_ITEMS,
    ) as file:
        yield file


def _read_footer(storage: Storage, path: str, limit: int) -> tuple[PlannedFile, tuple[int, ...], pa.Schema]:
    stat = storage.stat(path)
    if stat is None:
        raise InputNotFound(path)
    with open_parquet(storage, path, limit) as file:
        schema, metadata = file.schema_arrow, file.metadata
        groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise SchemaMismatch(path, f"it has two columns named {twice[0]!r}")
    fingerprint = file_fingerprint(storage, path)
    return PlannedFile(path, stat.size, stat.mtime_ns, sum(groups), fingerprint), groups, schema


def _columns(schema: pa.Schema, first: pa.Schema) -> str:
    """Describe the fields in which a schema differs from the first file's."""
    ours, theirs = ({_column(field) for field in each} for each in (schema, first))
    extra, missing = sorted(ours - theirs), sorted(theirs - ours)
    return f"not the first file's (more: {extra or 'none'}; missing: {missing or 'none'}; order counts too)"


def _column(field: pa.Field) -> str:
    return f"{field.name}: {field.type}{'' if field.nullable else ' not null'}"
