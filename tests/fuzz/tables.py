"""Parquet files: written in every way pyarrow knows, then perhaps damaged; planned, scored and read again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from redis import Redis

from engine import EngineError, SamplingParams
from jobs.context import JobContext
from jobs.errors import JobsError
from tests.fuzz.named import check_says
from tests.fuzz.values import JSON, TEXTS
from tests.jobs.answering import MODEL, queued_jobs, run_task, score_parquet

_TEXT = st.one_of(
    st.none(),
    st.text(max_size=12),
    st.sampled_from(["", "\0", "{prompt}", "x" * 3000, "[]", '[{"role": "user", "content": "a"}]']),
)
_BYTES = st.one_of(st.none(), st.binary(max_size=6), st.just(b"\xff\xfe"))
_MESSAGE = st.fixed_dictionaries({"role": _TEXT, "content": _TEXT})
_KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "string": (pa.string(), _TEXT),
    "large_string": (pa.large_string(), _TEXT),
    "string_view": (pa.string_view(), _TEXT),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), _TEXT),
    "binary": (pa.binary(), _BYTES),
    "null": (pa.null(), st.none()),
    "int64": (pa.int64(), st.none() | st.integers(-(2**63), 2**63 - 1)),
    "bool": (pa.bool_(), st.none() | st.booleans()),
    "double": (pa.float64(), st.none() | st.floats()),
    "timestamp": (pa.timestamp("us", "UTC"), st.none() | st.integers(-(2**62), 2**62)),
    "timestamp_ns": (pa.timestamp("ns"), st.none() | st.integers(-(2**62), 2**62)),
    "date": (pa.date32(), st.none() | st.integers(-(2**31), 2**31 - 1)),
    "time": (pa.time64("us"), st.none() | st.integers(0, 86_399_999_999)),
    "duration": (pa.duration("s"), st.none() | st.integers(-(2**62), 2**62)),
    "list": (pa.list_(pa.string()), st.none() | st.lists(_TEXT, max_size=2)),
    "chat": (
        pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        st.none() | st.lists(st.none() | _MESSAGE, max_size=3),
    ),
    "struct": (pa.struct({"a": pa.string()}), st.none() | st.fixed_dictionaries({"a": _TEXT})),
    "map": (pa.map_(pa.string(), pa.int32()), st.none() | st.just([("a", 1)])),
}
_RAW = {"timestamp", "timestamp_ns", "date", "time", "duration"}
"""Kinds whose values are given as their integers: Python's own types hold fewer."""


@dataclass(frozen=True)
class Written:
    """A file as it is written, the damage done to it, and the arguments of its run."""

    columns: list[tuple[str, str, list[Any]]]
    options: dict[str, Any]
    row_group_size: int
    invalid_text: bool = False
    damage: list[tuple[str, float, bytes]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


_NAMES = st.sampled_from(["a b", "", "é", "\0", "_x", "prompt ", "completion"])
_LIKELY = {"prompt": ["string", "large_string", "dictionary"], "chat": ["chat"]}
_MOST = st.sampled_from([True] * 7 + [False])
"""A case that is wrong in every way shows only the first check."""


@st.composite
def _columns(draw: st.DrawFn) -> list[tuple[str, str, list[Any]]]:
    rows = draw(st.sampled_from([0, 1, 2, 3, 7, 40]))
    names = ["prompt", "id", "chat", *draw(st.lists(_NAMES, max_size=2, unique=True))]
    names = list(dict.fromkeys(names)) if draw(_MOST) else names
    columns = []
    for name in names:
        likely = {"prompt": ["string", "large_string", "dictionary"], "chat": ["chat"]}.get(
            name, list(_KINDS)
        )
        kind = draw(st.sampled_from(likely if draw(_MOST) else list(_KINDS)))
        few = draw(st.lists(_KINDS[kind][1], min_size=1, max_size=5))
        columns.append((name, kind, [few[row % len(few)] for row in range(rows)]))
    return columns


_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "compression": st.sampled_from(["none", "snappy", "gzip", "brotli", "zstd", "lz4"]),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "data_page_size": st.sampled_from([1, 64, 1 << 20]),
        "version": st.sampled_from(["1.0", "2.4", "2.6"]),
        "write_statistics": st.booleans(),
        "store_schema": st.booleans(),
        "write_page_index": st.booleans(),
        "write_page_checksum": st.booleans(),
        "use_byte_stream_split": st.just(False),
        "column_encoding": st.sampled_from(["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]),
    },
)
_DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(["flip", "flip", "flip", "cut", "insert", "drop"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=4),
    ),
    max_size=3,
)
_ASKED = {"role": "user", "content": "{id}"}
_ARGUMENTS = st.fixed_dictionaries(
    {"rows_per_shard": st.sampled_from([1, 3, 1000])},
    optional={
        "prompt_column": st.sampled_from(["id", "chat", "", "nope"]) | TEXTS,
        "messages_column": st.sampled_from(["chat", "prompt", "nope"]),
        "template": st.sampled_from(["{prompt}", "{id} {chat}", "{"]) | st.just([_ASKED]) | JSON,
    },
)
_GOOD_ARGUMENTS = st.sampled_from(
    [
        {"rows_per_shard": 3},
        {"rows_per_shard": 1000, "template": "{prompt} {id}"},
        {"rows_per_shard": 1000, "messages_column": "chat"},
        {"rows_per_shard": 7, "template": [_ASKED]},
    ]
)
FILES = st.builds(
    Written,
    _columns(),
    _OPTIONS,
    st.sampled_from([1, 2, 1000]),
    _MOST.map(lambda most: not most),
    _DAMAGE | st.just([]),
    _MOST.flatmap(lambda most: _GOOD_ARGUMENTS if most else _ARGUMENTS),
)


def write(case: Written, path: Path) -> bool:
    """Write the file; return False where pyarrow itself cannot."""
    options = dict(case.options)
    if encoding := options.pop("column_encoding", None):
        options |= {"use_dictionary": False, "column_encoding": encoding}
    try:
        arrays = [_array(kind, values, case.invalid_text) for _, kind, values in case.columns]
        table = pa.Table.from_arrays(arrays, names=[name for name, _, _ in case.columns])
        pq.write_table(table, path, row_group_size=case.row_group_size, **options)
    except (pa.ArrowException, OSError, OverflowError, ValueError, TypeError):
        return False
    content = bytearray(path.read_bytes())
    for what, where, raw in case.damage:
        _harm(content, what, int(where * len(content)), raw)
    path.write_bytes(content)
    return True


def _array(kind: str, values: list[Any], invalid_text: bool) -> pa.Array:
    type_ = _KINDS[kind][0]
    if kind in _RAW:
        storage = pa.int32() if kind == "date" else pa.int64()
        return pa.array(values, storage).view(type_)
    if kind == "string" and invalid_text:  # Parquet never checks that a text is UTF-8
        raw = [None if value is None else value.encode() + b"\xff" for value in values]
        return pa.array(raw, pa.binary()).view(pa.string())
    return pa.array(values, type_)


def _harm(content: bytearray, what: str, at: int, raw: bytes) -> None:
    if what == "cut":
        del content[at:]
    elif what == "drop":
        del content[at : at + len(raw)]
    elif what == "insert":
        content[at:at] = raw
    else:
        for offset, value in enumerate(raw[: len(content) - at]):
            content[at + offset] ^= value or 255


def check_file(redis: Redis, folder: Path, case: Written) -> None:
    """Plan a run and score its shards: a part with every row for each shard, or a named error."""
    redis.flushall()
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    source, output = folder / "in.parquet", folder / "out"
    if not write(case, source):
        return
    contexts = _contexts(redis, folder)
    try:
        planned = score_parquet(next(contexts), str(source), str(output), **case.arguments)
    except (JobsError, EngineError) as error:
        check_says(error)
        assert not list(output.glob("part-*"))
        return
    failed = 0
    for job in queued_jobs(redis):
        try:
            run_task(next(contexts), job.func_name, *job.args, **job.kwargs)
        except JobsError as error:
            check_says(error)
            failed += 1
    assert not list(output.glob("_tmp.*"))
    if not failed:
        assert (output / "_SUCCESS").exists()
        assert sum(pq.read_metadata(part).num_rows for part in output.glob("part-*")) == planned["rows"]


def _contexts(redis: Redis, folder: Path) -> Iterator[JobContext]:
    number = 0
    while True:
        number += 1
        yield JobContext(
            redis,
            "bulk",
            f"job-{number}",
            f"execution{number}",
            (str(folder),),
            MODEL,
            SamplingParams.from_mapping,
        )
