"""Parquet files: written in every way pyarrow knows, then perhaps damaged; planned, scored and read again."""

import shutil
from dataclasses import dataclass
from itertools import count
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
    invalid_text: bool
    damage: list[tuple[str, float, bytes]]
    arguments: dict[str, Any]


_MOST = st.sampled_from([True] * 7 + [False])
"""A case that is wrong in every way shows only the first check."""


@st.composite
def _columns(draw: st.DrawFn) -> list[tuple[str, str, list[Any]]]:
    rows = draw(st.sampled_from([0, 1, 2, 7, 40]))
    likely = {"prompt": ["string", "large_string", "dictionary"], "chat": ["chat"]}
    columns = []
    for name in ("prompt", "id", "chat", draw(st.sampled_from(["a b", "", "é", "\0", "completion"]))):
        kinds = likely.get(name, list(_KINDS)) if draw(_MOST) else list(_KINDS)
        kind = draw(st.sampled_from(kinds))
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
        "store_schema": st.booleans(),
        "write_page_index": st.booleans(),
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
_ARGUMENTS = st.sampled_from(
    [
        {"rows_per_shard": 3},
        {"rows_per_shard": 1000, "template": "{prompt} {id}"},
        {"rows_per_shard": 1000, "messages_column": "chat"},
        {"rows_per_shard": 7, "template": [{"role": "user", "content": "{id}"}]},
    ]
)
FILES = st.builds(
    Written, _columns(), _OPTIONS, st.sampled_from([1, 2, 1000]), _MOST.map(lambda most: not most), _DAMAGE, _ARGUMENTS
)


def write(case: Written, path: Path) -> bool:
    """Write the file; return False where pyarrow itself cannot."""
    try:
        arrays = [_array(kind, values, case.invalid_text) for _, kind, values in case.columns]
        table = pa.Table.from_arrays(arrays, names=[name for name, _, _ in case.columns])
        pq.write_table(table, path, row_group_size=case.row_group_size, **case.options)
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
    numbers = count()

    def context() -> JobContext:
        number = next(numbers)
        place, make = (str(folder),), SamplingParams.from_mapping
        return JobContext(redis, "bulk", f"job-{number}", f"execution{number}", place, MODEL, make)

    try:
        planned = score_parquet(context(), str(source), str(output), **case.arguments)
    except (JobsError, EngineError) as error:
        check_says(error)
        assert not list(output.glob("part-*"))
        return
    failed = 0
    for job in queued_jobs(redis):
        try:
            run_task(context(), job.func_name, *job.args, **job.kwargs)
        except JobsError as error:
            check_says(error)
            failed += 1
    assert not list(output.glob("_tmp.*"))
    if not failed:
        assert (output / "_SUCCESS").exists()
        assert sum(pq.read_metadata(part).num_rows for part in output.glob("part-*")) == planned["rows"]
