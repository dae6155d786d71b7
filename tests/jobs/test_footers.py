"""A small footer that stands for gigabytes is refused before pyarrow parses it; one of a writer is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import errors
from jobs.context import JobContext
from jobs.context.shard_bytes import DEFAULT_BYTES, ShardBytes
from jobs.parquet.footer_cost import CHUNK_BYTES, ELEMENT_BYTES, FooterCost
from tests.jobs.answering import score_parquet

MakeContext = Callable[[], JobContext]


def varint(value: int) -> bytes:
    more = b""
    while value > 127:
        more += bytes([value & 127 | 128])
        value >>= 7
    return more + bytes([value])


def list_of(item: bytes, count: int, wire: int = 12) -> bytes:
    """A list in Thrift's compact protocol; wire: the type that it gives its items, by default structs."""
    return bytes([0xF0 | wire]) + varint(count) + item * count


def element(name: bytes, children: int = 0) -> bytes:
    """An element of a schema: a column of 64-bit integers, or one that has others."""
    head = b"\x35\x02\x18" if children else b"\x15\x02\x25\x02\x18"
    return head + varint(len(name)) + name + (b"\x15" + varint(2 * children) if children else b"") + b"\0"


ONE_COLUMN = element(b"schema", 1) + element(b"prompt")
EMPTY_CHUNK = b"\x26\0\0"


def footer(elements: bytes, count: int, row_groups: bytes) -> bytes:
    schema = bytes([0xFC]) + varint(count) + elements
    return b"\x15\x02\x19" + schema + b"\x16\0\x19" + row_groups + b"\0"


def row_group(chunks: bytes) -> bytes:
    return b"\x19" + chunks + b"\x16\0\x16\0\0"


def write_file(path: Path, contents: bytes) -> None:
    path.write_bytes(b"PAR1" + contents + len(contents).to_bytes(4, "little") + b"PAR1")


def read_footer(path: Path) -> bytes:
    data = path.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def nested(depth: int, name: bytes, leaves: int) -> bytes:
    """A schema of columns within columns, and so many in the innermost."""
    above = element(b"schema", 1) + element(name, 1) * (depth - 1) + element(name, leaves)
    return footer(above + element(b"leaf") * leaves, 1 + depth + leaves, list_of(b"", 0))


CHUNKS = list_of(row_group(list_of(EMPTY_CHUNK, 100_000)), 4)
HIDDEN_CHUNKS = list_of(row_group(list_of(EMPTY_CHUNK, 10, wire=8)), 1)


@pytest.mark.parametrize(
    ("contents", "error", "found"),
    [
        pytest.param(
            footer(ONE_COLUMN, 2, CHUNKS),
            errors.FooterTooLarge,
            r"takes \d+ bytes of memory.* column chunks.*TOKENMILL_MAX_SHARD_BYTES.*larger row groups",
            id="column chunks of three bytes",
        ),
        pytest.param(
            nested(60, b"x" * 800, 3000),
            errors.FooterTooLarge,
            r"takes \d+ bytes of memory.* schema elements",
            id="long names in the path of each column",
        ),
        pytest.param(
            nested(120, b"x", 1),
            errors.FooterTooLarge,
            "columns within columns, more than 100 deep",
            id="more columns within columns than pyarrow's recursion takes",
        ),
        pytest.param(
            footer(ONE_COLUMN, 2, HIDDEN_CHUNKS),
            errors.CorruptParquet,
            "a list with items of type 8, expected 12",
            id="a list that pyarrow reads as another one",
        ),
    ],
)
def test_a_small_footer_that_stands_for_much_is_refused_by_name(
    make_context: MakeContext, tmp_path: Path, contents: bytes, error: type[Exception], found: str
) -> None:
    path = tmp_path / "in.parquet"
    write_file(path, contents)
    with pytest.raises(error, match=found):
        score_parquet(make_context(), str(path), str(tmp_path / "out"))


@pytest.mark.parametrize("value", [b"\x11", b"\x15\0", b"\x18\0", b"\x1c\0", b"\x19\x05"])
def test_a_footer_of_unknown_fields_is_refused_after_a_few_of_them(value: bytes) -> None:
    contents = footer(ONE_COLUMN, 2, list_of(b"", 0))[:-1] + value * 1000 + b"\0"
    with pytest.raises(ValueError, match="a struct of more than 64 fields"):
        FooterCost("in.parquet", contents, DEFAULT_BYTES)


def test_a_footer_of_many_values_is_refused_however_little_they_take() -> None:
    unknown = b"\x09\x64" + list_of(list_of(b"\0", 120_000, wire=5), 100, wire=9)
    with pytest.raises(errors.FooterTooLarge, match="too many values, more than 7000000"):
        FooterCost("in.parquet", b"\x15\x02" + unknown + b"\0", DEFAULT_BYTES)


def test_many_columns_in_many_row_groups_are_read_within_what_a_shard_may_take(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path, columns, groups = tmp_path / "in.parquet", 60, 40
    numbers = {f"column {number}": [1.5] * groups for number in range(columns)}
    pq.write_table(pa.table({"prompt": ["a"] * groups, **numbers}), path, row_group_size=1)
    cost = FooterCost(str(path), read_footer(path), DEFAULT_BYTES).bytes
    least = CHUNK_BYTES * groups * columns + ELEMENT_BYTES * columns
    assert least < cost < 2 * least
    small = replace(make_context(), shard_bytes=ShardBytes(cost - 1))
    with pytest.raises(errors.FooterTooLarge, match=f"more than {cost - 1} "):
        score_parquet(small, str(path), str(tmp_path / "out"))
    enough = replace(make_context(), shard_bytes=ShardBytes(cost))
    assert score_parquet(enough, str(path), str(tmp_path / "out2"))["rows"] == groups


def test_a_footer_that_is_cut_off_anywhere_is_none(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "list": [[{"a": 1, "b": ["c"]}]]}), path)
    contents = read_footer(path)
    FooterCost(str(path), contents, DEFAULT_BYTES)
    for size in range(len(contents)):
        with pytest.raises(IndexError):
            FooterCost(str(path), contents[:size], DEFAULT_BYTES)
