"""A run's input files: what they hold."""

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
from jobs.parquet.formats.kinds import Kind, arrow_field, depends_on_others, merged, merged_texts, with_decimal
from jobs.parquet.outputs.part import columns_kept, output_schema
from jobs.parquet.planning.find_files import FoundFile, find_files, partition_columns
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.tables.columns import ROW_NUMBER, missing_column, with_added_fields
from jobs.runs.plans.dialects import check_dialect
from jobs.runs.plans.names import HEADED, JSONL, LINES, one_format
from jobs.runs.plans.plan import AddedColumn, Plan, PlannedFile, Shard, cut_shards
from jobs.runs.plans.spec import RunSpec


def read_inputs(context: JobContext, storage: Storage, spec: RunSpec, found: Sequence[FoundFile]) -> Plan:
    """Look at each file up to the run's limit; return a new run's plan. Raises InputError, also for columns that make
    no run."""
    look = _Look(storage, one_format((file.named for file in found), spec.input_format), spec.dialect)
    left = spec.limit
    for each in found:
        context.check_interrupted()
        look.take(each.path, left)
        if left is not None and (left := left - look.files[-1].rows) <= 0:
            break
    schema = look.schema
    columns, rows = _added_columns(found, schema.names, spec.filename_column)
    shards = cut_shards([[rows for rows, _ in each] for each in look.groups], spec.rows_per_shard, spec.limit)
    seed, planned_at = spec.sampling.get("seed"), time.time()
    plan = Plan(
        spec=spec,
        seed=secrets.randbits(63) if seed is None else seed,
        model=context.model.pinned(planned_at),
        planned_at=planned_at,
        version=version("tokenmill"),
        files=tuple(replace(file, values=tuple(own)) for file, own in zip(look.files, rows, strict=False)),
        shards=shards,
        added_columns=tuple(columns),
        input_format=look.format,
        columns=tuple(look.columns.items()),
        as_json=_read_as_json(spec, look),
        sizes=tuple(_num_bytes(look.groups[shard.file], shard) for shard in shards),
    )
    _check_columns(spec, with_added_fields(schema, columns), found[0].path)
    return plan


def _read_as_json(spec: RunSpec, look: "_Look") -> tuple[str, ...]:
    """Return the columns of JSON lines that are read as each row's own JSON, not as the type that all rows share.

    They are those of prompts, and those of an output that is lines again. Columns of texts and pictures are not among
    them.
    """
    if look.format != JSONL:
        return ()
    as_they_stand = {spec.prompt_column, spec.query_column, spec.document_column, *(spec.image_column or ())}
    kept = columns_kept(spec).of([*look.kinds]) if spec.writes_lines else ()
    read = dict.fromkeys((*row_source(spec).columns, *(look.kinds if kept is None else kept)))
    names = [name for name in read if name in look.kinds and name not in as_they_stand]
    return tuple(name for name in names if depends_on_others(look.kinds[name]))


def _num_bytes(groups: Sequence[tuple[int, int]], shard: Shard) -> int:
    num_bytes, start = 0.0, -shard.skip
    for rows, size in groups[shard.first_group : shard.first_group + shard.num_groups]:
        num_bytes += size * (min(start + rows, shard.rows) - max(start, 0)) / rows if rows else 0
        start += rows
    return round(num_bytes)


def _check_columns(spec: RunSpec, schema: pa.Schema, path: str) -> None:
    """Raise MissingColumn, WrongColumnType or ColumnConflict for columns, added ones included, that make no run."""
    source = row_source(spec)
    if spec.calibrate:
        content_free(spec, source)  # raises once, and not in every shard
    for column in source.columns:
        if column not in schema.names:
            raise missing_column(column, path, schema)
    source.check(schema)
    if spec.order is not None and ROW_NUMBER in schema.names:
        raise errors.ColumnConflict(ROW_NUMBER, "rename it in the input: a run in an order of its own adds it")
    output_schema(schema, spec, path)


_OF_COLUMNS = (errors.ColumnConflict, errors.MissingColumn, errors.WrongColumnType)
_TOLD_HERE = (*_OF_COLUMNS, errors.MixedFormats, errors.SearchTooLong)


def check_columns_here(spec: RunSpec) -> None:
    """Raise what planning would, as far as the input's first file is on this machine and shows it."""
    try:
        storage = Storage(("/",))
        found = find_files(storage, spec.input, spec.output, spec.input_format)
        path, file_format = found[0].path, one_format((file.named for file in found), spec.input_format)
        if file_format in LINES - HEADED:
            return
        look = scan(storage, path, file_format, 0, spec.dialect)
        columns, _ = _added_columns(found, look.schema.names, spec.filename_column)
        if file_format not in LINES:
            _check_columns(spec, with_added_fields(look.schema, columns), path)
    except _TOLD_HERE:
        raise
    except (errors.InputError, OSError):  # the planning says so, if it finds the same
        return


class _Look:
    def __init__(self, storage: Storage, file_format: str, dialect: Mapping[str, str]) -> None:
        """Raises InvalidJob for a dialect that files of the format do not have."""
        check_dialect(dialect, file_format)
        self._storage, self.format, self._dialect = storage, file_format, dialect
        self.kinds: dict[str, Kind] = {}
        self.files: list[PlannedFile] = []
        self.groups: list[list[tuple[int, int]]] = []
        self._schema: pa.Schema | None = None

    @property
    def columns(self) -> dict[str, Kind]:
        """Return the kinds of text files' columns, as the plan keeps them."""
        decimal = self._dialect.get("decimal", ".")
        return {name: with_decimal(kind, decimal) for name, kind in self.kinds.items()}

    @property
    def schema(self) -> pa.Schema:
        if self.format in LINES:
            return pa.schema([arrow_field(name, kind) for name, kind in self.columns.items()])
        return self._schema

    def take(self, path: str, most: int | None) -> None:
        """Look at a file in one state of it. most: rows, of no Parquet. Raises InputNotFound, InputBeingWritten."""
        stat = self._storage.stat(path)
        if stat is None:
            raise errors.InputNotFound(path)
        found = scan(self._storage, path, self.format, most, self._dialect)
        if self.format in LINES:
            self._take_kinds(path, found.kinds)
        else:
            self._check_schema(path, found.schema)
        fingerprint = file_fingerprint(self._storage, path, self.format)
        if self._storage.stat(path) != stat:
            raise errors.InputBeingWritten(path)
        rows = sum(rows for rows, _ in found.groups)
        self.files.append(PlannedFile(path, stat.size, stat.mtime_ns, rows, fingerprint, etag=stat.etag))
        self.groups.append(found.groups)

    def _take_kinds(self, path: str, kinds: Mapping[str, Kind]) -> None:
        """Merge what columns hold. CSV files have the same header; objects any of the names that one has."""
        is_headed = self.format in HEADED
        if is_headed and self.kinds and list(kinds) != list(self.kinds):
            what = f"its header is {brief(list(kinds))}, the first file's {brief(list(self.kinds))}"
            raise errors.SchemaMismatch(path, what)
        merge = merged_texts if is_headed else merged
        for name, kind in kinds.items():
            self.kinds[name] = merge(self.kinds.get(name, "null"), kind)

    def _check_schema(self, path: str, schema: pa.Schema) -> None:
        if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
            raise errors.SchemaMismatch(path, f"it has two columns named {twice[0]!r}")
        self._schema = schema if self._schema is None else self._schema
        if not schema.equals(self._schema):
            raise errors.SchemaMismatch(path, f"its columns are {_columns(schema, self._schema)}")


def _added_columns(
    found: Sequence[FoundFile], names: Sequence[str], filename_column: str | None
) -> tuple[list[AddedColumn], list[list[Any]]]:
    columns, rows = partition_columns(found, names)
    if filename_column is not None:
        if filename_column in (*names, *(column.name for column in columns)):
            raise errors.ColumnConflict(filename_column, "give filename_column another name")
        columns.append(AddedColumn(filename_column, "string"))
        rows = [[*values, each.path] for values, each in zip(rows, found, strict=True)]
    return columns, rows


def _columns(schema: pa.Schema, first: pa.Schema) -> str:
    ours, theirs = (
        {f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in each}
        for each in (schema, first)
    )
    extra, missing = sorted(ours - theirs), sorted(theirs - ours)
    return f"not the first file's (more: {extra or 'none'}; missing: {missing or 'none'}; order counts too)"


def check_as_planned(storage: Storage, plan: Plan, found: Sequence[FoundFile]) -> None:
    """Raise InputChanged for the first file that is not as planned. found: those that there are now."""
    limit, planned = plan.spec.limit, {file.path: file for file in plan.files}
    now = [file.path for file in found]
    if limit is not None and sum(file.rows for file in plan.files) >= limit:
        now = now[: len(planned)]  # those behind it are left out
    for path in [*now, *planned]:
        if path not in planned:
            raise errors.InputChanged(path, "it is new")
        if path not in now:
            raise errors.InputChanged(path, GONE)
        storage.check_interrupted()
        check_unchanged(storage, planned[path], input_format=plan.input_format)
