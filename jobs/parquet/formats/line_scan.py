"""Planning's look through a text file: its rows, where blocks of them begin, and what its columns hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np

from jobs.common.display import brief
from jobs.errors import CorruptTable, SchemaMismatch
from jobs.parquet.formats.kinds import Kind, kind_of, kind_of_texts, merged, text_kind
from jobs.parquet.formats.lines import lines_from, text_stream
from jobs.parquet.formats.problems import PROBLEM
from jobs.parquet.formats.records import Record, records
from jobs.parquet.storage import Storage, reading
from jobs.runs.plans.formats import HEADED, OPENAI_BATCH
from jobs.runs.plans.plan import Block

#: Bytes of a block: what a shard may have to read before its first row.
BLOCK_BYTES = 1 << 20

#: Rows that are looked at together.
SLICE_ROWS = 1024

#: Names that a file's rows may have in all.
MAX_COLUMNS = 10_000

START = Block(0, 1)

#: Enough that no two of a billion custom_ids are taken for one.
NAME_BYTES = 16

#: Lines that repeat a custom_id, each of which the plan lists.
MAX_REPEATED = 100_000

_BATCH_KINDS: Mapping[str, Kind] = {"custom_id": "text", "request": "json"}


@dataclass
class FoundLines:
    """What a text file holds. blocks, rows: of each block. kinds: of each column, in the file's order.

    names: of a batch file NAME_BYTES of each row, alike where two rows have the same custom_id.
    """

    blocks: list[Block] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    names: bytearray = field(default_factory=bytearray)

    def add_names(self, path: str, rows: Iterable[Any]) -> None:
        """Take what names each line of a batch file, or what no other line is named."""
        for row in rows:
            name = None if row is None else row["custom_id"]
            own = f"row {len(self.names)} of {path}" if name is None else f"name {name}"
            self.names += blake2b(own.encode(), digest_size=NAME_BYTES).digest()


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
        if file_format == OPENAI_BATCH:
            found.kinds = dict(_BATCH_KINDS)
        if file_format in HEADED:
            header = _header(path, rows)
            found.kinds, begin = dict.fromkeys(header.value, "null"), header.behind
        rows = islice(rows, max_rows)
        while part := list(islice(rows, SLICE_ROWS)):
            check_interrupted()
            for each in part:
                begin = _count(found, begin, each)
            values = [each.value for each in part if each.value is not None]
            if file_format == OPENAI_BATCH:
                found.add_names(path, (each.value for each in part))
            else:
                _look(path, found.kinds, file_format, values)
    return found


def repeated_rows(names: Sequence[bytearray], path: str) -> tuple[int, ...]:
    """Return the rows, counted over all files, whose custom_id an earlier one has. Raises CorruptTable."""
    found = np.frombuffer(b"".join(names), np.dtype((np.void, NAME_BYTES)))
    _, first = np.unique(found, return_index=True)
    repeated = np.setdiff1d(np.arange(len(found)), first)
    if len(repeated) > MAX_REPEATED:
        what = f"{len(repeated)} of its {len(found)} lines repeat the custom_id of an earlier one"
        raise CorruptTable(path, OPENAI_BATCH, what)
    return tuple(repeated.tolist())


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
        raise SchemaMismatch(path, f"it has two columns named {brief(twice[0])}")
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
    if file_format in HEADED:
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
