"""What planning and opening cost is bounded by name, and each can be stopped between two steps of it."""

import glob
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import errors
from jobs.context.shared_files import SharedFiles
from jobs.parquet.files.storage import Storage
from jobs.parquet.planning import find_files as search
from jobs.parquet.planning.find_files import Search, find_files
from jobs.parquet.planning.inputs import check_columns_here
from jobs.runs.plans.prompt_steps import MAX_SHARD_PIECES
from jobs.runs.plans.spec import RunSpec
from tests.examples import examples
from tests.jobs.answering import run_task, score_parquet
from tests.jobs.local_runs import Runs


class Interrupted(Exception):
    pass


class Fuse:
    """A check that counts its calls, and raises from one of them on."""

    def __init__(self, raises_at: float = float("inf")) -> None:
        self.num_calls, self._raises_at = 0, raises_at

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls >= self._raises_at:
            raise Interrupted


@pytest.fixture
def num_listings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many folders were listed so far."""
    listed = []
    scandir = os.scandir

    def counted(*args: Any) -> Any:
        listed.append(args)
        return scandir(*args)

    monkeypatch.setattr(os, "scandir", counted)
    return lambda: len(listed)


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), path)
    return path


def found(root: Path, pattern: str) -> list[str]:
    return [
        file.path for file in find_files(Storage([str(root)]), [f"{root}/{pattern}"], f"{root}/out")
    ]


@pytest.mark.parametrize("stars", ["**", "**/d/**/d/**"])
def test_a_glob_lists_each_folder_of_a_deep_tree_once(
    tmp_path: Path, num_listings: Callable[[], int], stars: str
) -> None:
    depth = 40
    deep = write(tmp_path / "in" / "/".join("d" * depth) / "x.parquet")
    assert found(tmp_path, f"in/{stars}/*.parquet") == [str(deep)]
    assert num_listings() <= depth + 2


NAMES = st.sampled_from(["a", "b", "_c", ".d", "k=1", "x.parquet"])
PARTS = st.sampled_from(
    ["*", "**", "?", "a", "[ab]", "[!a]", ".d", ".*", "_*", "k=*", "*.parquet", "[", "x.parquet"]
)


@settings(max_examples=examples(60))
@given(
    st.sets(st.lists(NAMES, min_size=1, max_size=4).map("/".join), max_size=8),
    st.lists(PARTS, min_size=1, max_size=4),
)
def test_a_glob_finds_what_pythons_own_finds(
    tmp_path_factory: pytest.TempPathFactory, files: set[str], parts: list[str]
) -> None:
    """Once each, and without the folders that `**` stands for."""
    root = tmp_path_factory.mktemp("tree")
    for name in files:
        if not (root / name).exists() and not any(
            (root / above).is_file() for above in _above(name)
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    pattern = f"{root}/{'/'.join(parts)}/?*"
    matches = Search(Storage([str(root)])).matches(pattern, with_hidden=True)
    ours = [(match.found_path, match.entry.is_folder) for match in matches]
    theirs = sorted({(path, os.path.isdir(path)) for path in glob.glob(pattern, recursive=True)})
    assert ours == theirs


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


@pytest.mark.parametrize("pattern", ["in", "in/**/*.parquet"])
def test_a_search_among_too_many_names_is_refused_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for number in range(8):
        write(tmp_path / "in" / f"k={number}" / "x.parquet")
    monkeypatch.setattr(search, "MAX_NAMES", 12)
    spec = RunSpec.from_arguments(f"{tmp_path}/{pattern}", f"{tmp_path}/out")
    with pytest.raises(errors.SearchTooLong, match=r"more than 12 names, the last in .*/in/k=\d"):
        find_files(Storage([str(tmp_path)]), spec.input, spec.output)
    with pytest.raises(errors.SearchTooLong):  # where it is submitted too
        check_columns_here(spec)


def test_planning_stops_between_any_two_steps_and_starts_anew(runs: Runs, tmp_path: Path) -> None:
    for name in ("k=1/a", "k=1/b", "k=2/plain/c"):
        write(tmp_path / "in" / f"{name}.parquet")
    for step in itertools.count(1):
        context = replace(runs.context(), check_interrupted=Fuse(step))
        try:
            score_parquet(
                context, f"{tmp_path}/in/**/*.parquet", str(runs.output), rows_per_shard=2
            )
        except Interrupted:
            continue
        break
    assert step > 20, "at each name, and at each file that is looked at or opened"
    assert len(runs.jobs) == 6
    runs.work()
    assert len(runs.rows()) == 9


def test_a_shard_stops_between_any_two_steps_and_opens_anew(runs: Runs) -> None:
    runs.plan(
        runs.write([f"{row}" for row in range(3000)], row_group_size=3000), rows_per_shard=3000
    )
    (job,) = runs.jobs
    step, files = 1, SharedFiles()
    while True:
        fuse = Fuse(step)
        context = replace(runs.context(), check_interrupted=fuse, files=files)
        try:
            run_task(context, job.func_name, *job.args)
        except Interrupted:
            step += 1 if step < 20 else 500
        else:
            break
    assert fuse.num_calls > 3000, "one at least for each row"
    assert len(runs.rows()) == 3000


def test_a_template_that_costs_too_much_in_a_shard_is_refused_where_it_is_submitted() -> None:
    too_long = "{a}" * (MAX_SHARD_PIECES // 1000 + 1)
    with pytest.raises(
        errors.InvalidJob, match=r"20001 pieces .* 20001000 in a shard of 1000 rows, more than"
    ):
        RunSpec.from_arguments("in.parquet", "out", template=too_long)
    assert RunSpec.from_arguments("in.parquet", "out", template=too_long, rows_per_shard=999)
