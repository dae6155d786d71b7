"""Planning's look through a text file: its rows, where blocks of them begin, and what its columns hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ...common.shown import shown
from ...errors import CorruptTable, SchemaMismatch
from ...runs.formats import JSONL
from ...runs.plan import Block
from ..storage import Storage, reading
from .kinds import Kind, kind_of, kind_of_texts, merged, text_kind
from .lines import lines_from, text_stream
from .problems import PROBLEM
from .records import Record, records

#: Bytes of a block: what a shard may have to read before its first row.
BLOCK_BYTES = 1 << 20

#: Rows that are looked at together.
SLICE_ROWS = 1024

#: Names that a file's rows may have in all.
MAX_COLUMNS = 10_000

START = Block(0, 1)


@dataclass
class FoundLines:
    """What a text file holds. blocks, rows: of each block. kinds: of each column, in the file's order."""

    blocks: list[Block] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)


def scan_lines(
    storage: Storage,
    path: str,
    file_format: str,
    check_interrupted: Callable[[], None],
    max_rows: int | None = None,
) -> FoundLines:
    """Look through a file. Raises CorruptTable, SchemaMismatch or InputNotFound.

    check_interrupted: called before rows are looked at; what it raises ends that. max_rows: so many are
    looked at.
    """
    found = FoundLines()
    with reading(path, "text"), storage.open_input(path) as source, text_stream(source) as stream:
        rows = records(path, file_format, lines_from(path, stream, START))
        begin = START
        if file_format != JSONL:
            header = _header(path, rows)
            found.kinds, begin = dict.fromkeys(header.value, "null"), header.behind
        rows = islice(rows, max_rows)
        while part := list(islice(rows, SLICE_ROWS)):
            check_interrupted()
            for each in part:
                begin = _count(found, begin, each)
            _look(path, found.kinds, file_format, [each.value for each in part if each.value is not None])
    return found


def read_header(storage: Storage, path: str, file_format: str) -> list[str]:
    """Return the names of a CSV file's columns. Raises CorruptTable, SchemaMismatch or InputNotFound."""
    with reading(path, "text"), storage.open_input(path) as source, text_stream(source) as stream:
        names: list[str] = _header(path, records(path, file_format, lines_from(path, stream, START))).value
        return names


def _header(path: str, rows: Iterator[Record]) -> Record:
    header = next(rows, None)
    if header is None:
        raise CorruptTable(path, "CSV", "it is empty: its first line must name the columns")
    if header.problem is not None:
        raise CorruptTable(path, "CSV", header.problem)
    if twice := [name for name, count in Counter(header.value).items() if count > 1]:
        raise SchemaMismatch(path, f"it has two columns named {shown(twice[0])}")
    _check_names(path, header.value)
    return header


def _count(found: FoundLines, begin: Block, record: Record) -> Block:
    """Count a record into its block; return where the next one begins."""
    if not found.blocks or (found.rows[-1] and record.behind.byte - found.blocks[-1].byte > BLOCK_BYTES):
        row = found.blocks[-1].row + found.rows[-1] if found.blocks else 0
        found.blocks.append(begin._replace(row=row))
        found.rows.append(0)
    found.rows[-1] += 1
    return record.behind


def _look(path: str, kinds: dict[str, Kind], file_format: str, values: list[Any]) -> None:
    """Take what rows hold into the kinds of their columns."""
    if file_format != JSONL:
        width = len(kinds)
        columns = zip(*(row for row in values if len(row) == width), strict=True)
        for name, column in zip(kinds, columns, strict=False):  # no column at all where no row is sound
            if kinds[name] != "text":
                kinds[name] = text_kind(kinds[name], kind_of_texts(text or None for text in column))
        return
    for row in values:
        for name, value in row.items():
            known = kinds.get(name)
            if known == "json" or (known == "text" and isinstance(value, str)):
                continue
            kinds[name] = kind_of(value) if known is None else merged(known, kind_of(value))
        if len(kinds) > MAX_COLUMNS:
            raise CorruptTable(path, "JSONL", f"its objects have more than {MAX_COLUMNS} names in all")
    _check_names(path, kinds)


def _check_names(path: str, names: Any) -> None:
    if PROBLEM in names:
        raise SchemaMismatch(path, f"a column is named {PROBLEM!r}")
    if len(names) > MAX_COLUMNS:
        raise CorruptTable(path, "CSV", f"its header names more than {MAX_COLUMNS} columns")
