"""Columns that stand in no file: of folders named `key=value`, and of the files' paths. Needs no pyarrow."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from jobs.errors import SchemaMismatch

#: How Hive, and whoever writes as it does, spells a null in a folder's name.
NULL = "__HIVE_DEFAULT_PARTITION__"
#: Name and text of each `key=value`, from the outside in; None for a null.
Keys = tuple[tuple[str, str | None], ...]

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class AddedColumn:
    name: str
    type: Literal["int64", "string"]


@dataclass(frozen=True)
class FoundFile:
    """A file's real path, its folders' names, and the path by which it was found, whose suffix tells its format."""

    path: str
    keys: Keys = ()
    named: str = ""

    @property
    def key_names(self) -> list[str]:
        return [name for name, _ in self.keys]


def folder_key(name: str) -> tuple[str, str | None] | None:
    key, equals, value = name.partition("=")
    if not key or not equals:
        return None
    return unquote(key), None if value == NULL else unquote(value)


def partition_columns(files: Sequence[FoundFile], in_files: Sequence[str]) -> tuple[list[AddedColumn], list[list[Any]]]:
    """Return the columns that the folders' names give, and each file's values in them.

    A column whose values are all integers is int64, any other string. in_files: the columns of the files, which stay.
    Raises SchemaMismatch when the files' folders do not have the same keys.
    """
    names = files[0].key_names
    for file in files:
        if file.key_names != names:
            raise SchemaMismatch(file.path, f"its folders give the columns {file.key_names}, the first file's {names}")
        if len(set(names)) < len(names):
            raise SchemaMismatch(file.path, f"its folders give a column twice: {names}")
    columns: list[AddedColumn] = []
    rows: list[list[Any]] = [[] for _ in files]
    for place, name in enumerate(names):
        if name in in_files:
            continue
        texts = [file.keys[place][1] for file in files]
        there = [text for text in texts if text is not None]
        is_integer = any(there) and all(_INTEGER.fullmatch(text) and int(text) in _INT64 for text in there)
        columns.append(AddedColumn(name, "int64" if is_integer else "string"))
        for row, text in zip(rows, texts, strict=True):
            row.append(int(text) if is_integer and text is not None else text)
    return columns, rows
