"""What a Parquet file's footer takes in memory once pyarrow has parsed it, told from its bytes.

Three bytes may stand for a column chunk of 800, and one long name is in the path of every column below it: so
all is counted before pyarrow makes any of it. Source: parquet.thrift, Thrift's compact protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jobs.errors import FooterTooLarge
from jobs.parquet.thrift import (
    BINARY,
    BYTE,
    DOUBLE,
    I16,
    I32,
    I64,
    INTEGERS,
    LIST,
    LISTS,
    MAX_DEPTH,
    STRUCT,
    TRUTHS,
    integer,
    varint,
)

#: Items of a list: row groups of a file, or columns of a row group. Fields of a struct: parquet.thrift knows
#: of no more than 17. Both together, of a footer: one of 16 MiB that some writer made has fewer.
MAX_FOOTER_ITEMS, MAX_FIELDS, MAX_VALUES = 1 << 17, 64, 7_000_000

#: Bytes in memory of each, rounded up from the most that pyarrow 18, 21 and 26 were seen to take. An element
#: of the schema becomes a node, a column and a field of Arrow's; most other structs are a part of a chunk.
ELEMENT_BYTES, CHUNK_BYTES, ROW_GROUP_BYTES, KEY_VALUE_BYTES = 2000, 800, 200, 200
STRUCT_BYTES, ITEM_BYTES, NUMBER_BYTES = 64, 48, 8

#: Columns within columns: pyarrow 18 goes down any number of them by recursion, 26 refuses more than these.
MAX_SCHEMA_DEPTH = 100

#: For each name in a column's path, which is put together to find the column, besides the name's own bytes.
NAME_BYTES = 64

#: Copies of a column's path, and of the footer's own bytes.
PATH_COPIES, FOOTER_COPIES = 3, 3


class _Kind(NamedTuple):
    """A struct of parquet.thrift. name: of many. cost: bytes in memory.

    lists: by field, the type of a list's items, and which struct they are; pyarrow reads the items as that,
    whatever type the footer gives. structs: by field, those that have such lists.
    """

    name: str = ""
    cost: int = STRUCT_BYTES
    lists: Mapping[int, tuple[int, _Kind]] = {}
    structs: Mapping[int, _Kind] = {}


_ANY = _Kind()
_ELEMENT = _Kind("schema elements", ELEMENT_BYTES)
_KEY_VALUE = _Kind("key-value pairs", KEY_VALUE_BYTES)
_META = _Kind(
    lists={2: (I32, _ANY), 3: (BINARY, _ANY), 8: (STRUCT, _KEY_VALUE), 13: (STRUCT, _ANY)},
    structs={16: _Kind(lists={2: (I64, _ANY), 3: (I64, _ANY)}), 17: _Kind(lists={2: (I32, _ANY)})},
)
_CRYPTO = _Kind(structs={2: _Kind(lists={1: (BINARY, _ANY)})})
_CHUNK = _Kind("column chunks", CHUNK_BYTES, structs={3: _META, 8: _CRYPTO})
_ROW_GROUP = _Kind("row groups", ROW_GROUP_BYTES, lists={1: (STRUCT, _CHUNK), 4: (STRUCT, _ANY)})
_FILE = _Kind(
    lists={2: (STRUCT, _ELEMENT), 4: (STRUCT, _ROW_GROUP), 5: (STRUCT, _KEY_VALUE), 7: (STRUCT, _ANY)}
)
_NUM_CHILDREN = 5  # of an element
_MAX_NUMBER = 1 << 15  # of a field


@dataclass
class _Element:
    """An element of the schema with others below it. children: so many still follow."""

    children: int
    path_bytes: int


class FooterCost:
    """Goes through a footer and adds up what it takes, `bytes`, until that is more than `limit`.

    Raises FooterTooLarge, IndexError where the data ends within the footer, ValueError for what is none.
    """

    def __init__(self, path: str, data: bytes, limit: int) -> None:
        self._path, self._data, self._limit = path, data, limit
        self._found: Counter[str] = Counter()
        self._num_values = 0
        self._num_children = 0  # of the element that came last
        self.bytes = FOOTER_COPIES * len(data)
        self._struct(0, _FILE, 0)

    def _add(self, cost: int) -> None:
        self.bytes += cost
        if self.bytes > self._limit:
            found = ", ".join(f"{count} {name}" for name, count in self._found.items() if name)
            what = f"takes {self.bytes} bytes of memory and more, once read ({found or 'many values'})"
            raise FooterTooLarge(self._path, what, f"{self._limit} (TOKENMILL_MAX_SHARD_BYTES)")

    def _count(self, values: int) -> None:
        self._num_values += values
        if self._num_values > MAX_VALUES:
            raise FooterTooLarge(self._path, "has too many values", str(MAX_VALUES))

    def _struct(self, at: int, kind: _Kind, depth: int) -> int:
        """Count what a struct holds; return the place behind it."""
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        data, number = self._data, 0
        for fields in range(MAX_FIELDS + 1):
            head = data[at]
            at += 1
            if head == 0:
                self._count(fields)
                return at
            wire = head & 15
            if head > 15:
                number += head >> 4
            else:
                number, at = integer(data, at)
                if not 0 <= number < _MAX_NUMBER:  # pyarrow would take it for another one
                    raise ValueError(f"it has a field of number {number}")
            if I16 <= wire <= I64:
                if kind is _ELEMENT and number == _NUM_CHILDREN and wire == I32:
                    self._num_children = integer(data, at)[0]
                while data[at] > 127:
                    at += 1
                at += 1
            elif wire not in TRUTHS:
                at = self._field(at, wire, number, kind, depth + 1)
        raise ValueError(f"it has a struct of more than {MAX_FIELDS} fields")

    def _field(self, at: int, wire: int, number: int, kind: _Kind, depth: int) -> int:
        """Count the value of a field that is no number; return the place behind it."""
        if wire == BINARY:
            size, at = varint(self._data, at)
            return at + size
        if wire == STRUCT:
            self._add(STRUCT_BYTES)
            return self._struct(at, kind.structs.get(number, _ANY), depth)
        if wire in LISTS:
            return self._list(at, kind.lists.get(number) if wire == LIST else None, depth)
        return at + _width(wire)

    def _list(self, at: int, known: tuple[int, _Kind] | None, depth: int) -> int:
        """Count a list; return the place behind it. known: see _Kind's `lists`."""
        size, wire = self._data[at] >> 4, self._data[at] & 15
        at += 1
        if size == 15:
            size, at = varint(self._data, at)
        if size == 0:
            return at  # whatever its type
        if known is not None and wire != known[0]:
            raise ValueError(f"it has a list with items of type {wire}, expected {known[0]}")
        kind = _ANY if known is None else known[1]
        if size > MAX_FOOTER_ITEMS:
            what = f"has a list of {size} {kind.name or 'items'}"
            raise FooterTooLarge(self._path, what, str(MAX_FOOTER_ITEMS))
        self._found[kind.name] += size
        self._count(size)
        if wire != STRUCT:
            self._add(size * (NUMBER_BYTES if wire in INTEGERS else ITEM_BYTES))
            return self._values(at, size, wire, depth)
        self._add(size * kind.cost)
        if kind is _ELEMENT:
            return self._schema(at, size, depth)
        for _ in range(size):
            at = self._struct(at, kind, depth)
        return at

    def _values(self, at: int, size: int, wire: int, depth: int) -> int:
        """Pass over the items of a list that are no structs; return the place behind them."""
        data = self._data
        if wire in INTEGERS:
            for _ in range(size):
                while data[at] > 127:
                    at += 1
                at += 1
        elif wire == BINARY:
            for _ in range(size):
                length, at = varint(data, at)
                at += length
        elif wire in LISTS:
            if depth == MAX_DEPTH:
                raise ValueError("it is nested too deeply")
            for _ in range(size):
                at = self._list(at, None, depth + 1)
        else:
            at += size * _width(wire)
        return at

    def _schema(self, at: int, size: int, depth: int) -> int:
        """Count the elements of a schema, each behind what it is a part of; return the place behind them."""
        above: list[_Element] = []
        for _ in range(size):
            start, self._num_children = at, 0
            at = self._struct(at, _ELEMENT, depth)
            while above and above[-1].children == 0:
                above.pop()
            path_bytes = at - start + NAME_BYTES
            if above:
                above[-1].children -= 1
                path_bytes += above[-1].path_bytes
            self._add(PATH_COPIES * path_bytes)
            if self._num_children > 0:
                above.append(_Element(self._num_children, path_bytes))
            if len(above) > MAX_SCHEMA_DEPTH:
                raise FooterTooLarge(self._path, "has columns within columns", f"{MAX_SCHEMA_DEPTH} deep")
        return at


def _width(wire: int) -> int:
    """Return the bytes of a value of a type; of truth values, those in a list. Raises ValueError."""
    if wire == DOUBLE:
        return 8
    if wire == BYTE or wire in TRUTHS:
        return 1
    raise ValueError(f"it has a value of type {wire}")
