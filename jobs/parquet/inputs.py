"""A run's input files: which they are, and what their footers say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import InputChanged, InputNotFound, InvalidJob, SchemaMismatch
from .plan import PlannedFile
from .spec import check_num_files
from .storage import FileStat, Storage, glob_chars, reading

#: Bytes read at once of each column: without a limit pyarrow holds a whole row group's compressed columns.
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Footer:
    """What planning needs of one file."""

    file: PlannedFile
    row_groups: tuple[int, ...]
    schema: pa.Schema


def find_files(storage: Storage, inputs: Sequence[str], output: str) -> list[str]:
    """Return the files that a run reads, in order. Raises InputNotFound, PathOutsideRoots or InvalidJob.

    A folder gives its *.parquet, except hidden ones and those that start with an underscore; a folder's and a
    glob's files come sorted. Files below the output are never input.
    """
    paths: list[str] = []
    for item in inputs:
        with reading(item):
            found = [path for path in _expand(storage, item) if not path.startswith(output + "/")]
        if not found:
            raise InputNotFound(item)
        paths += found
    check_num_files(len(paths))
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise InvalidJob(f"the input names {twice[0]} twice: name each file once")
    return paths


def read_footers(
    storage: Storage, paths: Sequence[str], check_interrupted: Callable[[], None]
) -> list[Footer]:
    """Read the footer of each file. Raises CorruptParquet, or SchemaMismatch when the files differ.

    check_interrupted: called before each file; what it raises ends the reading.
    """
    first = _read_footer(storage, paths[0])
    footers = [first]
    for path in paths[1:]:
        check_interrupted()
        footer = _read_footer(storage, path)
        if not footer.schema.equals(first.schema):
            raise SchemaMismatch(path, f"its columns are {_columns(footer.schema, first.schema)}")
        footers.append(replace(footer, schema=first.schema))  # one schema in memory, not one for each file
    return footers


@contextmanager
def unchanged(storage: Storage, file: PlannedFile) -> Iterator[None]:
    """Raise InputChanged when a file is not the one that was planned, or no longer when the body ends."""
    _check_unchanged(storage, file)
    try:
        yield
    finally:  # a file that was replaced meanwhile explains whatever else went wrong
        _check_unchanged(storage, file)


def _check_unchanged(storage: Storage, file: PlannedFile) -> None:
    stat = storage.stat(file.path)
    if stat is None:
        raise InputChanged(file.path, "it is gone")
    if stat != FileStat(file.size, file.mtime_ns):
        planned = f"planned {file.size} bytes at {file.mtime_ns} ns"
        raise InputChanged(file.path, f"{planned}, found {stat.size} bytes at {stat.mtime_ns} ns")


@contextmanager
def open_parquet(storage: Storage, path: str, footer: Any = None) -> Iterator[Any]:
    """Open a file as pyarrow's ParquetFile; what the body reads from it raises CorruptParquet as well.

    footer: the file's FileMetaData where it was parsed before.
    """
    with (
        reading(path),
        storage.open_input(path) as source,
        pq.ParquetFile(source, metadata=footer, buffer_size=READ_BYTES, pre_buffer=False) as file,
    ):
        yield file


def _expand(storage: Storage, item: str) -> list[str]:
    if glob_chars(item) and not os.path.lexists(item):
        return [path for path in storage.expand(item) if storage.stat(path) is not None]
    path = storage.resolve(item)
    if storage.is_folder(path):
        return [
            storage.resolve(os.path.join(path, name))
            for name in storage.names(path)
            if name.endswith(".parquet") and name[0] not in "._"
        ]
    return [path] if storage.stat(path) is not None else []


def _read_footer(storage: Storage, path: str) -> Footer:
    stat = storage.stat(path)
    if stat is None:
        raise InputNotFound(path)
    with open_parquet(storage, path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise SchemaMismatch(path, f"it has two columns named {twice[0]!r}")
    return Footer(PlannedFile(path, stat.size, stat.mtime_ns, sum(groups)), groups, schema)


def _columns(schema: pa.Schema, first: pa.Schema) -> str:
    """Describe the fields in which a schema differs from the first file's."""
    ours, theirs = ({f"{field.name}: {field.type}" for field in each} for each in (schema, first))
    extra, missing = sorted(ours - theirs), sorted(theirs - ours)
    return f"not the first file's (more: {extra or 'none'}; missing: {missing or 'none'}; order counts too)"
