"""A run's input files: what they hold, and whether they are still those that were planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.common.display import brief
from jobs.context.shard_bytes import DEFAULT_BYTES
from jobs.errors import ColumnConflict, InputChanged, InputNotFound, RunError, SchemaMismatch
from jobs.parquet.added_columns import with_added_fields
from jobs.parquet.filesystem import FileStat
from jobs.parquet.fingerprint import file_fingerprint
from jobs.parquet.footer import MAX_FOOTER_BYTES, check_footer
from jobs.parquet.footer_cost import MAX_FOOTER_ITEMS
from jobs.parquet.formats.arrow_decoder import look_at_arrow
from jobs.parquet.formats.kinds import Kind, arrow_type, merged, text_kind
from jobs.parquet.formats.line_scan import read_header, repeated_rows, scan_lines
from jobs.parquet.storage import Storage, reading
from jobs.runs.plans.formats import ARROW, HEADED, LINES, OPENAI_BATCH, PARQUET, one_format
from jobs.runs.plans.partitions import AddedColumn, FoundFile, partition_columns
from jobs.runs.plans.plan import PlannedFile
from jobs.runs.refusals import InputBeingWritten

#: Bytes read at once of each column: without a limit pyarrow holds a whole row group's compressed columns.
READ_BYTES = 1 << 16

#: Of a file to which others write, before it is told.
MAX_LOOKS = 3

T = TypeVar("T")

#: Gives the fingerprint of one file in a state of it.
Fingerprint = Callable[[FileStat], str]


@dataclass(frozen=True)
class Inputs:
    """What planning knows of a run's input.

    row_groups: for each file the rows of each of its row groups, record batches or blocks of lines.
    file_schema: of every one of the files. added_columns: what comes behind its columns, of the names of
    folders and files. input_format, columns, repeated: as in the plan. group_bytes: of files of row groups
    or record batches those of each, unpacked.
    """

    files: tuple[PlannedFile, ...]
    row_groups: tuple[tuple[int, ...], ...]
    file_schema: pa.Schema
    added_columns: tuple[AddedColumn, ...]
    input_format: str = PARQUET
    columns: tuple[tuple[str, Kind], ...] = ()
    repeated: tuple[int, ...] = ()
    group_bytes: tuple[tuple[int, ...], ...] = ()

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
    input_format: str | None = None,
) -> Inputs:
    """Look at each file: at its footer or its record batches, or at all lines; and at its fingerprint.

    check_interrupted: called before each file, and before lines; what it raises ends the reading. limit: see
    parquet_file. max_rows: files behind that many rows are left out, and not looked at. input_format: where
    names do not tell it. Raises CorruptParquet, CorruptTable, FooterTooLarge, MixedFormats, SchemaMismatch
    when the files differ, or ColumnConflict for the filename column.
    """
    file_format = one_format((file.named or file.path for file in found), input_format)
    group_bytes: list[tuple[int, ...]] = []
    if file_format in LINES:
        files, row_groups, kinds, repeated = _read_lines(
            storage, found, file_format, check_interrupted, max_rows
        )
        schema = pa.schema([(name, arrow_type(kind)) for name, kind in kinds.items()])
    else:
        kinds, repeated = {}, ()
        files, row_groups, group_bytes, schema = _read_footers(
            storage, found, file_format, check_interrupted, limit, max_rows
        )
    columns, rows = _added_columns(found, schema.names, filename_column)
    files = [replace(file, values=tuple(values)) for file, values in zip(files, rows, strict=False)]
    kept, sizes = tuple(kinds.items()), tuple(group_bytes)
    return Inputs(tuple(files), tuple(row_groups), schema, tuple(columns), file_format, kept, repeated, sizes)


def read_columns(
    storage: Storage,
    found: Sequence[FoundFile],
    filename_column: str | None,
    limit: int = DEFAULT_BYTES,
    input_format: str | None = None,
) -> pa.Schema | None:
    """Return what a look at the first file alone tells of the run's columns, the added ones included.

    None for lines of text, whose columns are known when all were read; but a CSV file's header is looked at.
    limit: see parquet_file. Raises CorruptParquet, CorruptTable, FooterTooLarge, MixedFormats, SchemaMismatch
    when the folders differ, or ColumnConflict for the filename column.
    """
    file_format = one_format((file.named or file.path for file in found), input_format)
    if file_format in LINES:
        if file_format in HEADED:
            _added_columns(found, read_header(storage, found[0].path, file_format), filename_column)
        return None
    *_, schema = _read_footer(storage, found[0].path, file_format, limit)
    columns, _ = _added_columns(found, schema.names, filename_column)
    return with_added_fields(schema, columns)


def settled(storage: Storage, path: str, look: Callable[[FileStat], T]) -> T:
    """Return what a look at a file tells, all of it of the state that the look is given: a plan that has the
    size of one state and the rows of another fits no file ever.

    Raises InputNotFound, or InputBeingWritten where each of several looks found another file behind it. Where
    none is left, what a look has raised says more: that a link has taken its place.
    """
    refused: RunError | None = None
    for _ in range(MAX_LOOKS):
        stat = storage.stat(path)
        if stat is None:
            raise refused or InputNotFound(path)
        try:
            found = look(stat)
        except RunError as error:
            refused = error
            if storage.stat(path) == stat:
                raise
        else:
            if storage.stat(path) == stat:
                return found
    raise InputBeingWritten(path, MAX_LOOKS)


def _added_columns(
    found: Sequence[FoundFile], names: Sequence[str], filename_column: str | None
) -> tuple[list[AddedColumn], list[list[Any]]]:
    """Return the added columns, and each file's values in them. names: of the files' own columns."""
    columns, rows = partition_columns(found, names)
    if filename_column is not None:
        if filename_column in (*names, *(column.name for column in columns)):
            raise ColumnConflict(filename_column, "give filename_column another name")
        columns.append(AddedColumn(filename_column, "string"))
        rows = [[*values, each.path] for values, each in zip(rows, found, strict=True)]
    return columns, rows


@contextmanager
def unchanged(storage: Storage, file: PlannedFile, fingerprint: Fingerprint) -> Iterator[None]:
    """Raise InputChanged when a file is not the one that was planned, or no longer when the body ends.

    fingerprint: gives that of the file in the state that is named; it is asked for only where a file of the
    planned size has another modification time or ETag.
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
    is_as_planned = (stat.mtime_ns, stat.etag) == (file.mtime_ns, file.etag)
    if not is_as_planned and fingerprint(stat) != file.fingerprint:
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


def _read_footers(
    storage: Storage,
    found: Sequence[FoundFile],
    file_format: str,
    check_interrupted: Callable[[], None],
    limit: int,
    max_rows: int | None,
) -> tuple[list[PlannedFile], list[tuple[int, ...]], list[tuple[int, ...]], pa.Schema]:
    files: list[PlannedFile] = []
    row_groups: list[tuple[int, ...]] = []
    group_bytes: list[tuple[int, ...]] = []
    schema: pa.Schema | None = None
    for each in found:
        check_interrupted()
        file, groups, own = _read_footer(storage, each.path, file_format, limit)
        schema = own if schema is None else schema
        if not own.equals(schema):
            raise SchemaMismatch(each.path, f"its columns are {_columns(own, schema)}")
        files.append(file)
        row_groups.append(tuple(rows for rows, _ in groups))
        group_bytes.append(tuple(size for _, size in groups))
        if max_rows is not None and (max_rows := max_rows - file.rows) <= 0:
            break
    return files, row_groups, group_bytes, schema


def _read_footer(
    storage: Storage, path: str, file_format: str, limit: int
) -> tuple[PlannedFile, list[tuple[int, int]], pa.Schema]:
    """Return a file, rows and bytes of each of its groups, and its schema."""
    return settled(storage, path, lambda stat: _look_at_footer(storage, path, stat, file_format, limit))


def _look_at_footer(
    storage: Storage, path: str, stat: FileStat, file_format: str, limit: int
) -> tuple[PlannedFile, list[tuple[int, int]], pa.Schema]:
    if file_format == ARROW:
        with reading(path, file_format), storage.open_input(path) as source:
            messages, schema = look_at_arrow(path, source)
        counts = [each.rows or 0 for each in messages.batches]
        groups = [(rows, stat.size * rows // max(1, sum(counts))) for rows in counts]
    else:
        with open_parquet(storage, path, limit) as file:
            schema, metadata = file.schema_arrow, file.metadata
            found = map(metadata.row_group, range(metadata.num_row_groups))
            groups = [(group.num_rows, group.total_byte_size) for group in found]
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise SchemaMismatch(path, f"it has two columns named {twice[0]!r}")
    fingerprint = file_fingerprint(storage, path, file_format)
    file = PlannedFile(
        path, stat.size, stat.mtime_ns, sum(rows for rows, _ in groups), fingerprint, etag=stat.etag
    )
    return file, groups, schema


def _read_lines(
    storage: Storage,
    found: Sequence[FoundFile],
    file_format: str,
    check_interrupted: Callable[[], None],
    max_rows: int | None,
) -> tuple[list[PlannedFile], list[tuple[int, ...]], dict[str, Kind], tuple[int, ...]]:
    """Look through text files. CSV files have the same header; objects any of the names that one has."""
    files: list[PlannedFile] = []
    row_groups: list[tuple[int, ...]] = []
    kinds: dict[str, Kind] = {}
    names: list[bytearray] = []
    for each in found:
        stat, fingerprint, lines = settled(
            storage,
            each.path,
            lambda stat, path=each.path, most=max_rows: (  # type: ignore[misc]
                stat,
                file_fingerprint(storage, path, file_format),
                scan_lines(storage, path, file_format, check_interrupted, most),
            ),
        )
        if file_format in HEADED and files and list(lines.kinds) != list(kinds):
            what = f"its header is {brief(list(lines.kinds))}, the first file's {brief(list(kinds))}"
            raise SchemaMismatch(each.path, what)
        merge = text_kind if file_format in HEADED else merged
        for name, kind in lines.kinds.items():
            kinds[name] = merge(kinds.get(name, "null"), kind)
        files.append(
            PlannedFile(
                each.path,
                stat.size,
                stat.mtime_ns,
                sum(lines.rows),
                fingerprint,
                blocks=tuple(lines.blocks),
                etag=stat.etag,
            )
        )
        row_groups.append(tuple(lines.rows))
        names.append(lines.names)
        if max_rows is not None and (max_rows := max_rows - files[-1].rows) <= 0:
            break
    repeated = repeated_rows(names, files[0].path) if file_format == OPENAI_BATCH else ()
    return files, row_groups, kinds, repeated


def _columns(schema: pa.Schema, first: pa.Schema) -> str:
    """Describe the fields in which a schema differs from the first file's."""
    ours, theirs = ({_column(field) for field in each} for each in (schema, first))
    extra, missing = sorted(ours - theirs), sorted(theirs - ours)
    return f"not the first file's (more: {extra or 'none'}; missing: {missing or 'none'}; order counts too)"


def _column(field: pa.Field) -> str:
    return f"{field.name}: {field.type}{'' if field.nullable else ' not null'}"
