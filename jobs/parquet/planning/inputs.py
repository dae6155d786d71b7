"""Scans a run's input files, and makes a plan of what they hold."""

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from jobs import errors
from jobs.common.display import brief
from jobs.context import JobContext
from jobs.parquet.asks.scores import content_free
from jobs.parquet.files.fingerprint import GONE, check_unchanged, file_fingerprint
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import scan
from jobs.parquet.formats.kinds import (
    Kind,
    arrow_field,
    depends_on_other_rows,
    merged,
    merged_texts,
    with_decimal,
)
from jobs.parquet.outputs.part import columns_kept, output_schema
from jobs.parquet.planning.find_files import FoundFile, find_files, partition_columns
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.tables.columns import ROW_NUMBER, missing_column, with_added_fields
from jobs.runs.plans.dialects import check_dialect
from jobs.runs.plans.names import HEADED, JSONL, LINES, one_format
from jobs.runs.plans.plan import AddedColumn, Plan, PlannedFile, Shard, cut_shards
from jobs.runs.plans.spec import RunSpec


def read_inputs(
    context: JobContext, storage: Storage, spec: RunSpec, found_files: Sequence[FoundFile]
) -> Plan:
    """Scan the files, up to the run's limit of rows, and return the plan of a new run.

    Raises InputError for a file that cannot be read, and for columns that do not fit the run.
    """
    file_format = one_format((file.found_path for file in found_files), spec.input_format)
    scanned = _ScannedFiles(storage, file_format, spec.dialect)
    rows_left = spec.limit
    for file in found_files:
        context.check_interrupted()
        scanned.add(file.path, rows_left)
        if rows_left is not None:
            rows_left -= scanned.files[-1].rows
            if rows_left <= 0:
                break

    schema = scanned.schema
    added_columns, added_values = _added_columns(found_files, schema.names, spec.filename_column)
    planned_files = []
    # Files beyond the limit were not scanned, so they are left out.
    for planned_file, values in zip(scanned.files, added_values, strict=False):
        planned_files.append(replace(planned_file, values=tuple(values)))
    shards = cut_shards(scanned.rows_of_groups, spec.rows_per_shard, spec.limit)
    shard_sizes = [_num_bytes(scanned.groups[shard.file], shard) for shard in shards]
    seed = spec.sampling.get("seed")
    if seed is None:
        seed = secrets.randbits(63)
    planned_at = time.time()
    plan = Plan(
        spec=spec,
        seed=seed,
        model=context.model.pinned(planned_at),
        planned_at=planned_at,
        version=version("tokenmill"),
        files=tuple(planned_files),
        shards=shards,
        added_columns=tuple(added_columns),
        input_format=scanned.format,
        columns=tuple(scanned.columns.items()),
        as_json=_columns_read_as_json(spec, scanned),
        sizes=tuple(shard_sizes),
    )
    _check_columns(spec, with_added_fields(schema, added_columns), found_files[0].path)
    return plan


def _columns_read_as_json(spec: RunSpec, scanned: "_ScannedFiles") -> tuple[str, ...]:
    """Return the columns of JSON lines in which each value must keep the form that it has in its line.

    Such a column is read as JSON. Any other column gets one type for all rows, which may change how a value looks. A
    column is returned if its type could change a value, and if templates, messages or an output of JSON lines show its
    values. A column of whole prompts, queries, documents or pictures is never returned.
    """
    if scanned.format != JSONL:
        return ()
    never_json = {
        spec.prompt_column,
        spec.query_column,
        spec.document_column,
        *(spec.image_column or ()),
    }
    written_columns: Sequence[str] = ()
    if spec.writes_lines:
        all_columns = list(scanned.kinds)
        chosen = columns_kept(spec).chosen_from(all_columns)
        written_columns = all_columns if chosen is None else chosen

    as_json = []
    # A dict, so that the names keep their order and none comes twice.
    candidates = dict.fromkeys((*row_source(spec).columns, *written_columns))
    for name in candidates:
        if name not in scanned.kinds or name in never_json:
            continue
        if depends_on_other_rows(scanned.kinds[name]):
            as_json.append(name)
    return tuple(as_json)


def _num_bytes(groups: Sequence[tuple[int, int]], shard: Shard) -> int:
    """Return how many bytes a shard's rows have.

    groups: for each row group of the shard's file, how many rows and bytes it has.
    """
    num_bytes = 0.0
    # Rows are counted from the shard's first row. The shard may begin within its first group.
    start = -shard.skip  # the first row of the next group
    end_group = shard.first_group + shard.num_groups
    for group_rows, group_bytes in groups[shard.first_group : end_group]:
        end = start + group_rows
        rows_of_shard = min(end, shard.rows) - max(start, 0)
        if group_rows:
            num_bytes += group_bytes * rows_of_shard / group_rows
        start = end
    return round(num_bytes)


def _check_columns(spec: RunSpec, schema: pa.Schema, path: str) -> None:
    """Raise MissingColumn, WrongColumnType or ColumnConflict if a run cannot be made from these columns.

    schema: the columns of the input, and the columns that planning adds.
    """
    source = row_source(spec)
    if spec.calibrate:
        content_free(spec, source)  # raises its errors here once, and not in every shard
    for column in source.columns:
        if column not in schema.names:
            raise missing_column(column, path, schema)
    source.check(schema)
    if spec.order is not None and ROW_NUMBER in schema.names:
        raise errors.ColumnConflict(
            ROW_NUMBER, "rename it in the input: a run with an order adds a column of this name"
        )
    output_schema(schema, spec, path)


#: Errors of planning that a submit raises at once.
_RAISED_HERE = (
    errors.ColumnConflict,
    errors.MissingColumn,
    errors.WrongColumnType,
    errors.MixedFormats,
    errors.SearchTooLong,
)


def check_columns_here(spec: RunSpec) -> None:
    """Raise the errors that planning would raise, as far as this machine and the input's first file show them."""
    try:
        storage = Storage(("/",))
        found_files = find_files(storage, spec.input, spec.output, spec.input_format)
        path = found_files[0].path
        file_format = one_format((file.found_path for file in found_files), spec.input_format)
        if file_format in LINES - HEADED:
            return  # the columns of JSON lines are only known once all lines are read
        contents = scan(storage, path, file_format, rows=0, dialect=spec.dialect)
        columns, _ = _added_columns(found_files, contents.schema.names, spec.filename_column)
        if file_format not in LINES:  # the header of a CSV file names no types
            _check_columns(spec, with_added_fields(contents.schema, columns), path)
    except _RAISED_HERE:
        raise
    except (errors.InputError, OSError):
        return  # planning reports such an error, unless it occurs only on this machine


class _ScannedFiles:
    """The input files that were scanned, and what is known about them.

    files: the files as a plan names them. groups: for each file, the rows and bytes of its row groups. kinds: the types
    of the columns if the files are text, see formats/kinds.py.
    """

    def __init__(self, storage: Storage, file_format: str, dialect: Mapping[str, str]) -> None:
        """Take the files' format and dialect. Raises InvalidJob for a dialect that the format does not have."""
        check_dialect(dialect, file_format)
        self._storage = storage
        self.format = file_format
        self._dialect = dialect
        self.kinds: dict[str, Kind] = {}
        self.files: list[PlannedFile] = []
        self.groups: list[list[tuple[int, int]]] = []
        self._schema: pa.Schema | None = None

    @property
    def columns(self) -> dict[str, Kind]:
        """Return the kinds of a text file's columns, as the plan keeps them."""
        decimal = self._dialect.get("decimal", ".")
        return {name: with_decimal(kind, decimal) for name, kind in self.kinds.items()}

    @property
    def rows_of_groups(self) -> list[list[int]]:
        """Return the number of rows of each row group, file by file."""
        rows_by_file = []
        for groups in self.groups:
            rows_by_file.append([rows for rows, _ in groups])
        return rows_by_file

    @property
    def schema(self) -> pa.Schema:
        """Return the columns that all these files have."""
        if self.format in LINES:
            return pa.schema([arrow_field(name, kind) for name, kind in self.columns.items()])
        return self._schema

    def add(self, path: str, max_rows: int | None) -> None:
        """Scan a file. Raises InputNotFound, or InputBeingWritten if the file changes meanwhile.

        max_rows: how many rows to scan; None for all. Ignored for a Parquet file, because only its footer is read.
        """
        stat = self._storage.stat(path)
        if stat is None:
            raise errors.InputNotFound(path)
        contents = scan(self._storage, path, self.format, max_rows, self._dialect)
        if self.format in LINES:
            self._merge_kinds(path, contents.kinds)
        else:
            self._check_schema(path, contents.schema)
        fingerprint = file_fingerprint(self._storage, path, self.format)
        if self._storage.stat(path) != stat:
            raise errors.InputBeingWritten(path)
        num_rows = sum(rows for rows, _ in contents.groups)
        self.files.append(
            PlannedFile(path, stat.size, stat.mtime_ns, num_rows, fingerprint, etag=stat.etag)
        )
        self.groups.append(contents.groups)

    def _merge_kinds(self, path: str, kinds: Mapping[str, Kind]) -> None:
        """Merge the kinds of a file's columns into the kinds that earlier files gave these columns.

        Raises SchemaMismatch if a CSV file has another header than the first file.
        """
        is_headed = self.format in HEADED
        if is_headed and self.kinds and list(kinds) != list(self.kinds):
            header = brief(list(kinds))
            first_header = brief(list(self.kinds))
            difference = f"its header is {header}, and the first file's header is {first_header}"
            raise errors.SchemaMismatch(path, difference)
        merge = merged_texts if is_headed else merged
        for name, kind in kinds.items():
            known_kind = self.kinds.get(name, "null")
            self.kinds[name] = merge(known_kind, kind)

    def _check_schema(self, path: str, schema: pa.Schema) -> None:
        """Raise SchemaMismatch if a file has other columns than the first file."""
        for name, count in Counter(schema.names).items():
            if count > 1:
                raise errors.SchemaMismatch(path, f"it has two columns named {name!r}")
        if self._schema is None:
            self._schema = schema
        if not schema.equals(self._schema):
            difference = _column_difference(schema, self._schema)
            raise errors.SchemaMismatch(path, f"its columns are {difference}")


def _added_columns(
    found_files: Sequence[FoundFile], names: Sequence[str], filename_column: str | None
) -> tuple[list[AddedColumn], list[list[Any]]]:
    """Return the columns that a run adds to its input, and each file's values in them. Raises ColumnConflict.

    names: the files' own columns.
    """
    columns, values_by_file = partition_columns(found_files, names)
    if filename_column is not None:
        added_names = [column.name for column in columns]
        if filename_column in names or filename_column in added_names:
            raise errors.ColumnConflict(filename_column, "give filename_column another name")
        columns.append(AddedColumn(filename_column, "string"))
        for values, file in zip(values_by_file, found_files, strict=True):
            values.append(file.path)
    return columns, values_by_file


def _column_difference(schema: pa.Schema, first: pa.Schema) -> str:
    """Return how a file's columns differ from the first file's, in words."""
    columns = set(map(_column_text, schema))
    first_columns = set(map(_column_text, first))
    extra = sorted(columns - first_columns)
    missing = sorted(first_columns - columns)
    return (
        f"not the first file's (more: {extra or 'none'}; missing: {missing or 'none'}; "
        "their order must be the same too)"
    )


def _column_text(field: pa.Field) -> str:
    """Return a column's name and type, for a message."""
    text = f"{field.name}: {field.type}"
    return text if field.nullable else f"{text} not null"


def check_as_planned(storage: Storage, plan: Plan, present_files: Sequence[FoundFile]) -> None:
    """Raise InputChanged if a file is new, changed or gone since planning.

    present_files: the files that the input names now.
    """
    limit = plan.spec.limit
    planned_files = {file.path: file for file in plan.files}
    present_paths = [file.path for file in present_files]
    if limit is not None and sum(file.rows for file in plan.files) >= limit:
        # The run does not read the files after its limit.
        present_paths = present_paths[: len(planned_files)]
    for path in present_paths:
        if path not in planned_files:
            raise errors.InputChanged(path, "it is new")
        storage.check_interrupted()
        check_unchanged(storage, planned_files[path], input_format=plan.input_format)
    for path in planned_files:
        if path not in present_paths:
            raise errors.InputChanged(path, GONE)
