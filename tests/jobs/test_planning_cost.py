"""What planning and opening cost is bounded by name, and each can be stopped between two steps of it."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from jobs import errors
from jobs.context import JobContext
from jobs.context.shared_files import SharedFiles
from jobs.parquet import walk
from jobs.parquet.find_files import find_files
from jobs.parquet.local_check import check_columns_here
from jobs.parquet.sources import prompt_source
from jobs.parquet.storage import Storage
from jobs.parquet.walk import Walk
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec
from jobs.runs.plans.template import MAX_SHARD_PIECES, Template
from tests.jobs.answering import queued_jobs, run_task, score_parquet, work_off

MakeContext = Callable[[], JobContext]


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
    return [file.path for file in find_files(Storage([str(root)]), [f"{root}/{pattern}"], f"{root}/out")]


@pytest.mark.parametrize("stars", ["**", "**/**/**", "**/d/**/d/**"])
def test_a_glob_lists_each_folder_of_a_deep_tree_once(
    tmp_path: Path, num_listings: Callable[[], int], stars: str
) -> None:
    depth = 40
    deep = write(tmp_path / "in" / "/".join("d" * depth) / "x.parquet")
    assert found(tmp_path, f"in/{stars}/*.parquet") == [str(deep)]
    assert num_listings() <= depth + 2


def test_a_tree_of_six_hundred_folders_is_searched_to_its_end(tmp_path: Path) -> None:
    deep = tmp_path / "in" / "/".join("d" * 600)
    deep.mkdir(parents=True)
    (deep / "x.parquet").touch()
    assert found(tmp_path, "in/**/**/**/*.parquet") == [str(deep / "x.parquet")]
    with pytest.raises(errors.NestedFolders):
        found(tmp_path, "in")


def test_links_that_lead_back_are_gone_through_once(tmp_path: Path, num_listings: Callable[[], int]) -> None:
    file = write(tmp_path / "in" / "d" / "x.parquet")
    for name in ("back", "too", "d/back"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "in")
    assert found(tmp_path, "in/**/*.parquet") == [str(file)]
    assert num_listings() <= 3


NAMES = st.sampled_from(["a", "b", "_c", ".d", "k=1", "x.parquet"])
PARTS = st.sampled_from(
    ["*", "**", "?", "a", "[ab]", "[!a]", ".d", ".*", "_*", "k=*", "*.parquet", "[", "x.parquet"]
)


@settings(max_examples=200, deadline=None)
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
        if not (root / name).exists() and not any((root / above).is_file() for above in _above(name)):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    pattern = f"{root}/{'/'.join(parts)}/?*"
    matches = Walk(Storage([str(root)])).matches(pattern, lambda name: False)
    ours = [(match.named, match.is_folder) for match in matches]
    theirs = sorted({(path, os.path.isdir(path)) for path in glob.glob(pattern, recursive=True)})
    assert ours == theirs


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


@pytest.mark.parametrize("pattern", ["in", "in/**/*.parquet", "in/*/*/*", "in/k=*"])
def test_a_search_among_too_many_names_is_refused_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for number in range(8):
        write(tmp_path / "in" / f"k={number}" / "x.parquet")
    monkeypatch.setattr(walk, "MAX_NAMES", 12)
    spec = RunSpec.from_arguments(f"{tmp_path}/{pattern}", f"{tmp_path}/out")
    with pytest.raises(errors.SearchTooLong, match=r"more than 12 names, the last in .*/in/k=\d"):
        find_files(Storage([str(tmp_path)]), spec.input, spec.output)
    with pytest.raises(errors.SearchTooLong):  # where it is submitted too
        check_columns_here(spec)


def test_folders_that_give_more_columns_than_the_limit_are_refused(tmp_path: Path) -> None:
    deep = tmp_path / "in" / "/".join(f"k{number}=1" for number in range(101))
    deep.mkdir(parents=True)
    (deep / "x.parquet").touch()
    for pattern in ("in", "in/**/*.parquet"):
        with pytest.raises(errors.SchemaMismatch, match="more columns than the limit of 100"):
            found(tmp_path, pattern)


def test_planning_stops_between_any_two_steps_and_starts_anew(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    for name in ("k=1/a", "k=1/b", "k=2/plain/c"):
        write(tmp_path / "in" / f"{name}.parquet")
    arguments = (f"{tmp_path}/in/**/*.parquet", f"{tmp_path}/out")

    def is_interrupted_at(step: int) -> bool:
        context = replace(make_context(), check_interrupted=Fuse(step))
        try:
            score_parquet(context, *arguments, rows_per_shard=2)
        except Interrupted:
            return True
        return False

    step = 1
    while is_interrupted_at(step):
        step += 1
    assert step > 20, "at each name, and at each file that is looked at or opened"
    assert len(queued_jobs(redis)) == 6
    work_off(redis, make_context)
    assert len(pq.read_table(tmp_path / "out")) == 9


def test_a_shard_stops_between_any_two_steps_and_opens_anew(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": [f"{row}" for row in range(3000)]}), tmp_path / "in.parquet")
    score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=3000)
    (job,) = queued_jobs(redis)
    step, files = 1, SharedFiles()
    while True:
        fuse = Fuse(step)
        context = replace(make_context(), check_interrupted=fuse, files=files)
        try:
            run_task(context, job.func_name, *job.args)
        except Interrupted:
            step += 1 if step < 20 else 500
        else:
            break
    assert fuse.num_calls > 3000, "one at least for each row"
    assert len(pq.read_table(tmp_path / "out")) == 3000


def test_a_plan_that_cannot_be_read_yet_holds_up_no_other_runs(tmp_path: Path) -> None:
    files, began, go = SharedFiles(), threading.Event(), threading.Event()

    def hang() -> Any:
        began.set()
        assert go.wait(30)
        return "late"

    thread = threading.Thread(target=files.plan, args=("hangs", hang))
    thread.start()
    assert began.wait(30)
    other: list[Any] = []
    second = threading.Thread(
        target=lambda: other.append(files.plan("other", lambda: "at once")), daemon=True
    )  # type: ignore[arg-type,return-value]
    second.start()
    second.join(10)
    assert other == ["at once"]
    go.set()
    thread.join(30)


TOO_LONG = "{a}" * (MAX_SHARD_PIECES // 1000 + 1)


def test_a_template_that_costs_too_much_in_a_shard_is_refused_where_it_is_submitted() -> None:
    with pytest.raises(errors.InvalidJob, match=r"20001 pieces, 20001000 in a shard of 1000 rows, more than"):
        RunSpec.from_arguments("in.parquet", "out", template=TOO_LONG)
    chat = [{"role": "user", "content": "{a}" * 10_001}] * 2
    with pytest.raises(errors.InvalidJob, match="20002 pieces"):
        RunSpec.from_arguments("in.parquet", "out", template=chat)
    assert RunSpec.from_arguments("in.parquet", "out", template=TOO_LONG, rows_per_shard=999)


def test_a_plan_made_by_hand_passes_no_bound(tmp_path: Path, make_context: MakeContext, redis: Redis) -> None:
    fine = RunSpec.from_arguments("in.parquet", "out", template="{a}")
    with pytest.raises(errors.InvalidJob, match="20001 pieces"):
        prompt_source(replace(fine, template=TOO_LONG))
    write(tmp_path / "in.parquet")
    score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=1)
    text = (tmp_path / "out" / "_plan.json").read_text()
    with pytest.raises(ValueError, match="more rows than its arguments allow"):
        Plan.from_text(text.replace("[0, 0, 1, 0, 1, 0]", "[0, 0, 2, 0, 1, 0]"))


class Counted:
    """A value that counts how often it is turned into text."""

    def __init__(self) -> None:
        self.num_formats = 0

    def __format__(self, spec: str) -> str:
        self.num_formats += 1
        return "v"


def test_a_row_turns_each_value_into_text_once_however_often_it_stands_there() -> None:
    template, value = Template.parse("x{a}" * 500 + "{b}"), Counted()
    values = {"a": value, "b": ""}
    assert template.filled_chars(values) == 1000
    assert template.fill(values) == "xv" * 500
    assert value.num_formats == 2
