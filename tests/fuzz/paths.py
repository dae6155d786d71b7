"""Paths and run ids, checked against a small tree with links that lead out of it."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import strategies as st

from engine import EngineError
from jobs.errors import JobsError
from jobs.parquet.find_files import find_files
from jobs.parquet.shard_task import shard_task
from jobs.parquet.storage import Storage
from jobs.runs.plans.spec import RunSpec
from tests.fuzz.named import check_says
from tests.fuzz.values import JSON, SAMPLING, TEXTS

_PIECES = st.one_of(
    st.sampled_from(["..", ".", "", "in", "out", "link-in", "link-out", "loop", "a.parquet", "*", "**", "?"]),
    st.sampled_from(["[a", "[!]", "%2e%2e", "%00", "~", "x" * 300, "C:", "\\", "_plan.json", "\n"]),
    TEXTS,
)
_STARTS = st.one_of(
    st.sampled_from(["", "/", "//", "./", "{root}/", "{root}/../", "file://{root}/", "file://host"]),
    st.sampled_from(["file://", "file:///", "s3://", "S3://key:secret@", "http://", "hdfs:"]),
)
PATHS = st.one_of(st.builds(lambda start, *rest: start + "/".join(rest), _STARTS, _PIECES, _PIECES), JSON)
ARGUMENTS = st.tuples(
    st.one_of(PATHS, st.lists(PATHS, max_size=3)),
    PATHS,
    st.fixed_dictionaries(
        {},
        optional={
            "prompt_column": JSON,
            "messages_column": JSON,
            "template": JSON,
            "sampling": st.one_of(SAMPLING, JSON),
            "rows_per_shard": JSON,
        },
    ),
)
SHARDS = st.tuples(st.one_of(st.from_regex(r"[0-9a-f]{16}", fullmatch=True), JSON), PATHS, JSON)


def make_tree(folder: Path) -> Path:
    """Make the tree; return its root."""
    root = folder / "root"
    (root / "in").mkdir(parents=True)
    (root / "in" / "a.parquet").touch()
    (folder / "outside").mkdir()
    (folder / "outside" / "b.parquet").touch()
    (root / "link-in").symlink_to("in")
    (root / "link-out").symlink_to("../outside")
    (root / "loop").symlink_to("loop")
    return root


def check_arguments(root: Path, case: tuple[object, object, dict[str, object]]) -> None:
    """A run's arguments: a spec whose files and output lie below the root, or a named error."""
    source, output, options = case
    storage = Storage((str(root),))
    try:
        spec = RunSpec.from_arguments(_below(source, root), _below(output, root), **options)
        files = find_files(storage, spec.input, spec.output)
        found = [storage.resolve(spec.output), *(file.path for file in files)]
    except (JobsError, EngineError) as error:
        check_says(error)
        return
    for path in found:
        real = os.path.realpath(path)
        assert real == str(root) or real.startswith(f"{root}/"), f"{path} lies outside {root}"


def check_shard(root: Path, case: tuple[object, object, object]) -> None:
    """A shard job's arguments: a task, or a named error."""
    try:
        shard_task(case[0], _below(case[1], root), case[2])  # type: ignore[arg-type]
    except JobsError as error:
        check_says(error)


def _below(value: object, root: Path) -> object:
    if isinstance(value, list):
        return [_below(item, root) for item in value]
    return value.replace("{root}", str(root)) if isinstance(value, str) else value
