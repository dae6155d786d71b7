"""A run's input files: what they hold."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.errors import ColumnConflict, CorruptTable, InputBeingWritten, InputChanged, InputNotFound, SchemaMismatch
from jobs.parquet.files.filesystem import FileStat
from jobs.parquet.files.fingerprint import file_fingerprint
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import scan
from jobs.parquet.formats.converter import NAME_BYTES
from jobs.parquet.formats.kinds import Kind, arrow_field, merged, merged_texts
from jobs.parquet.tables.columns import with_added_fields
from jobs.parquet.tables.table_reading import look_at
from jobs.runs.plans.formats import ARROW, HEADED, LINES, OPENAI_BATCH, PARQUET, one_format
from jobs.runs.plans.partitions import AddedColumn, FoundFile, partition_columns
from jobs.runs.plans.plan import Plan, PlannedFile
from jobs.runs.plans.spec import RunSpec

#: Lines that repeat a custom_id, each of which the plan lists.
MAX_REPEATED = 100_000

T = TypeVar("T")

Looked = tuple[PlannedFile, list[tuple[int, int]]]
"""A file, and rows and bytes of each of its groups."""


@dataclass(frozen=True)
class Inputs:
    """What planning knows of a run's input.

    row_groups, group_bytes: for each file the rows of each of its row groups, and their bytes, unpacked.
    file_schema: of every one of the files. added_columns: what comes behind its columns, of the names of
    folders and files. input_format, columns, repeated: as in the plan.
    """

    files: tuple[PlannedFile, ...]
    row_groups: tuple[tuple[int, ...], ...]
    group_bytes: tuple[tuple[int, ...], ...]
    file_schema: pa.Schema
    added_columns: tuple[AddedColumn, ...]
    input_format: str = PARQUET
    columns: tuple[tuple[str, Kind], ...] = ()
    repeated: tuple[int, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Return all columns that a template may name, in the order in which the output has them."""
        return with_added_fields(self.file_schema, self.added_columns)


def read_inputs(
    context: JobContext, storage: Storage, spec: RunSpec, found: Sequence[FoundFile], before: Plan | None = None
) -> Inputs:
    """Look at each file: at a Parquet file's footer, else at all rows; and at its fingerprint.

    before: the run's plan; what it knows of files that are no Parquet is not looked up again. Files behind
    the run's limit are left out. Raises CorruptParquet, CorruptTable, TableNotRead, MixedFormats,
    SchemaMismatch when the files differ, or ColumnConflict for the filename column.
    """
    file_format = one_format((file.named or file.path for file in found), spec.input_format)
    known = before if before is not None and before.input_format == file_format else None
    look = _Look(storage, file_format, context.shard_bytes.limit, known)
    left = spec.limit
    for each in found:
        context.check_interrupted()
        look.take(each.path, left)
        if left is not None and (left := left - look.files[-1].rows) <= 0:
            break
    schema, repeated = look.schema, look.repeated()
    columns, rows = _added_columns(found, schema.names, spec.filename_column)
    return Inputs(
        tuple(replace(file, values=tuple(values)) for file, values in zip(look.files, rows, strict=False)),
        tuple(tuple(rows for rows, _ in groups) for groups in look.groups),
        tuple(tuple(size for _, size in groups) for groups in look.groups),
        schema,
        tuple(columns),
        file_format,
        tuple(look.kinds.items()),
        repeated,
    )


def read_columns(
    storage: Storage, found: Sequence[FoundFile], filename_column: str | None, input_format: str | None = None
) -> pa.Schema | None:
    """Return what the first file alone tells of the run's columns, added ones included; None for lines of text.

    Raises as read_inputs does.
    """
    file_format = one_format((file.named or file.path for file in found), input_format)
    if file_format in LINES - HEADED:
        return None
    path = found[0].path
    schema = look_at(storage, path).schema if file_format == PARQUET else scan(storage, path, file_format, 0).schema
    columns, _ = _added_columns(found, schema.names, filename_column)
    return None if file_format in LINES else with_added_fields(schema, columns)


class _Look:
    """What a look at one file after the other has told. known: a plan of the same format."""

    def __init__(self, storage: Storage, file_format: str, limit: int, known: Plan | None) -> None:
        self._storage, self._format, self._limit = storage, file_format, limit
        self._known: dict[tuple[str, str], PlannedFile] = {}
        self.kinds: dict[str, Kind] = {}
        if known is not None and file_format not in (PARQUET, OPENAI_BATCH):
            self._known = {(file.path, file.fingerprint): file for file in known.files}
            self._known_kinds = dict(known.columns)
        self.files: list[PlannedFile] = []
        self.groups: list[list[tuple[int, int]]] = []
        self._schema: pa.Schema | None = None
        self._names: list[bytearray] = []

    @property
    def schema(self) -> pa.Schema:
        if self._format in LINES:
            return pa.schema([arrow_field(name, kind) for name, kind in self.kinds.items()])
        return self._schema

    def repeated(self) -> tuple[int, ...]:
        """Return the rows whose custom_id an earlier one has."""
        return repeated_rows(self._names, self.files[0].path) if self._format == OPENAI_BATCH else ()

    def take(self, path: str, most: int | None) -> None:
        """Look at a file. most: so many of its rows, where it is no Parquet."""
        look = self._footer if self._format == PARQUET else lambda path, stat: self._rows(path, stat, most)
        file, groups = settled(self._storage, path, lambda stat: look(path, stat))
        self.files.append(file)
        self.groups.append(groups)

    def _footer(self, path: str, stat: FileStat) -> Looked:
        found = look_at(self._storage, path, self._limit)
        self._check_schema(path, found.schema)
        fingerprint = file_fingerprint(self._storage, path)
        return _planned(path, stat, fingerprint, found.groups), found.groups

    def _rows(self, path: str, stat: FileStat, most: int | None) -> Looked:
        fingerprint = file_fingerprint(self._storage, path, self._format)
        known = self._known.get((path, fingerprint))
        if known is not None and self._format in LINES:
            self._take_kinds(path, self._known_kinds)
        else:
            found = scan(self._storage, path, self._format, most if known is None else 0, self._limit)
            if self._format == ARROW:
                self._check_schema(path, found.schema)
            self._take_kinds(path, found.kinds)
            self._names.append(found.names)
        groups = found.groups if known is None else [(known.rows, stat.size)]
        return _planned(path, stat, fingerprint, groups), groups

    def _take_kinds(self, path: str, kinds: Mapping[str, Kind]) -> None:
        """Merge what columns hold. CSV files have the same header; objects any of the names that one has."""
        is_headed = self._format in HEADED
        if is_headed and self.kinds and list(kinds) != list(self.kinds):
            what = f"its header is {brief(list(kinds))}, the first file's {brief(list(self.kinds))}"
            raise SchemaMismatch(path, what)
        merge = merged_texts if is_headed else merged
        for name, kind in kinds.items():
            self.kinds[name] = merge(self.kinds.get(name, "null"), kind)

    def _check_schema(self, path: str, schema: pa.Schema) -> None:
        if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
            raise SchemaMismatch(path, f"it has two columns named {twice[0]!r}")
        self._schema = schema if self._schema is None else self._schema
        if not schema.equals(self._schema):
            raise SchemaMismatch(path, f"its columns are {_columns(schema, self._schema)}")


def _planned(path: str, stat: FileStat, fingerprint: str, groups: Sequence[tuple[int, int]]) -> PlannedFile:
    rows = sum(rows for rows, _ in groups)
    return PlannedFile(path, stat.size, stat.mtime_ns, rows, fingerprint, etag=stat.etag)


def repeated_rows(names: Sequence[bytearray], path: str) -> tuple[int, ...]:
    """Return the rows whose custom_id an earlier one has, by NAME_BYTES of each row. Raises CorruptTable."""
    found = np.frombuffer(b"".join(names), np.dtype((np.void, NAME_BYTES)))
    _, first = np.unique(found, return_index=True)
    repeated = np.setdiff1d(np.arange(len(found)), first)
    if len(repeated) > MAX_REPEATED:
        what = f"{len(repeated)} of its {len(found)} lines repeat the custom_id of an earlier one"
        raise CorruptTable(path, OPENAI_BATCH, what)
    return tuple(repeated.tolist())


def settled(storage: Storage, path: str, look: Callable[[FileStat], T]) -> T:
    """Return what a look at a file tells of one state of it. Raises InputNotFound, or InputBeingWritten."""
    stat = storage.stat(path)
    if stat is None:
        raise InputNotFound(path)
    found = look(stat)
    if storage.stat(path) != stat:
        raise InputBeingWritten(path)
    return found


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


def _columns(schema: pa.Schema, first: pa.Schema) -> str:
    """Describe the fields in which a schema differs from the first file's."""
    ours, theirs = (
        {f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in each}
        for each in (schema, first)
    )
    extra, missing = sorted(ours - theirs), sorted(theirs - ours)
    return f"not the first file's (more: {extra or 'none'}; missing: {missing or 'none'}; order counts too)"


def check_as_planned(storage: Storage, plan: Plan, inputs: Inputs) -> None:
    """Raise InputChanged for the first file that is not as planned."""
    planned, found = ({file.path: file for file in files} for files in (plan.files, inputs.files))
    for path in [*found, *planned]:
        if path not in planned:
            raise InputChanged(path, "it is new")
        if path not in found:
            raise InputChanged(path, storage.what_is_there(path))
        if planned[path] != found[path]:
            raise InputChanged(path, _difference(planned[path], found[path]))
    if list(planned) != list(found):
        raise InputChanged(plan.spec.input[0], "its files come in another order")


def _difference(planned: PlannedFile, found: PlannedFile) -> str:
    for name in ("size", "rows", "values"):
        if getattr(planned, name) != getattr(found, name):
            return f"{name}: planned {getattr(planned, name)}, found {getattr(found, name)}"
    return f"it has the same {found.size} bytes, but other contents"
