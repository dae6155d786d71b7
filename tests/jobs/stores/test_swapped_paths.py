"""Folders and files that are swapped between their check and their use lead nobody out of the data roots."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import errors
from jobs.parquet.files.storage import Storage
from jobs.runs.plans.names import JOURNAL, PLAN, part_name
from jobs.runs.plans.spec import RunSpec
from tests.jobs.answering import run_task
from tests.jobs.killing import Executions, finish
from tests.jobs.local_runs import Runs


class SwappedBefore(Storage):
    """Calls `swap` once, when a file operation has been asked for and every check before it was made."""

    def __init__(self, roots: tuple[str, ...], operation: str, swap: Callable[[], None]) -> None:
        super().__init__(roots)
        self.operation, self.swap = operation, swap


def _swapping(operation: str) -> Callable[..., Any]:
    def swap_and_go_on(self: SwappedBefore, *arguments: Any) -> Any:
        if operation == self.operation and not arguments[0].endswith(f"/{PLAN}"):
            self.operation = ""
            self.swap()
        return getattr(super(SwappedBefore, self), operation)(*arguments)

    return swap_and_go_on


for _operation in ("make_folder", "open_input", "open_output", "publish", "create", "remove"):
    setattr(SwappedBefore, _operation, _swapping(_operation))


@pytest.fixture
def runs(runs: Runs) -> Runs:
    runs.source = runs.source.parent / "in" / "in.parquet"
    runs.source.parent.mkdir()
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), runs.source)
    return runs


@pytest.fixture
def executions(runs: Runs) -> Executions:
    return Executions(runs, RunSpec.from_arguments(str(runs.source), str(runs.output)))


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outside")


def swap_for_link(path: Path, target: Path) -> None:
    """Put a link in the place of a folder or file, which stays beside it."""
    path.rename(f"{path}.real")
    path.symlink_to(target)


def put_back(path: Path) -> None:
    path.unlink()
    Path(f"{path}.real").rename(path)


@pytest.mark.parametrize("operation", ["open_output", "publish", "create", "remove"])
def test_nothing_of_a_shard_is_written_where_its_folder_is_swapped_for_a_link(
    runs: Runs, executions: Executions, outside: Path, operation: str
) -> None:
    executions.plan()
    (outside / "_tmp.precious.tmp").touch()  # as what the end of a run removes
    swap = partial(swap_for_link, runs.output, outside)
    work = executions.open(0, partial(SwappedBefore, operation=operation, swap=swap))
    with pytest.raises(errors.PathSwapped, match=r"out.*is a link now"):
        finish(work)
    assert os.listdir(outside) == ["_tmp.precious.tmp"]
    put_back(runs.output)
    work.close()
    assert runs.score()["completion"].to_pylist() == ["A", "B", "C"]


@pytest.mark.parametrize("operation", ["make_folder", "open_output"])
def test_no_plan_is_written_where_its_folder_is_swapped_for_a_link(
    runs: Runs, tmp_path: Path, outside: Path, operation: str
) -> None:
    above = tmp_path / "team"
    above.mkdir()
    executions = Executions(
        runs, RunSpec.from_arguments(str(runs.source), str(above / "runs" / "out"))
    )
    swap = partial(swap_for_link, above, outside)
    with pytest.raises(errors.PathSwapped, match=r"'team' is a link now"):
        executions.plan(partial(SwappedBefore, operation=operation, swap=swap))
    assert os.listdir(outside) == []
    assert runs.jobs == []


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_input_that_is_swapped_for_a_link_is_not_read(
    runs: Runs, executions: Executions, outside: Path, is_folder: bool
) -> None:
    shutil.copy2(runs.source, outside / runs.source.name)  # so alike that nothing else tells
    path = runs.source.parent if is_folder else runs.source
    target = outside if is_folder else outside / runs.source.name
    swapped = partial(
        SwappedBefore, operation="open_input", swap=partial(swap_for_link, path, target)
    )
    with pytest.raises(errors.PathSwapped):
        executions.plan(swapped)
    put_back(path)
    executions.plan()
    with pytest.raises(errors.RunError):
        executions.open(0, swapped)


@pytest.mark.timeout(10, method="thread")  # a wait in C ends by no signal
def test_an_input_that_becomes_a_fifo_holds_up_nobody(runs: Runs, executions: Executions) -> None:
    def swap() -> None:
        runs.source.unlink()
        os.mkfifo(runs.source)

    with pytest.raises(errors.InputNotFound):
        executions.plan(partial(SwappedBefore, operation="open_input", swap=swap))


@pytest.mark.timeout(10, method="thread")  # as above
@pytest.mark.parametrize(
    "plant", [Path.symlink_to, Path.hardlink_to, lambda path, _: os.mkfifo(path)]
)
def test_what_is_planted_under_a_temporary_name_is_replaced(
    runs: Runs, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    runs.plan()
    (job,) = runs.jobs
    context = runs.context()
    plant(runs.output / f"_tmp.{context.execution_id}.{part_name(0)}.tmp", victim)
    run_task(context, job.func_name, *job.args)
    assert victim.read_text() == "kept"
    assert len(runs.rows()) == 3


def test_a_path_with_dots_is_confined_as_what_it_means(tmp_path: Path, outside: Path) -> None:
    storage = Storage((str(tmp_path),))
    (outside / "x").touch()
    for path in (f"{tmp_path}/../{outside.name}/x", str(outside / "x")):
        with pytest.raises(errors.PathOutsideRoots):
            storage.open_input(path)


def test_a_part_whose_folder_is_moved_away_while_it_gets_its_name_is_taken_back(
    runs: Runs, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.plan()
    work, moved, link = runs.answered(runs.jobs[0]), outside / "moved", os.link

    def link_and_move(*names: Any, **options: Any) -> None:
        link(*names, **options)
        if names[1] != part_name(0):
            return
        runs.output.rename(moved)
        shutil.copytree(
            moved, runs.output, ignore=lambda *_: [part_name(0)]
        )  # another one of the same name

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link_and_move)
        with pytest.raises(errors.PathSwapped, match=r"moved away"):
            work.result()
    work.close()
    assert sorted(os.listdir(moved)) == [JOURNAL, "_keys", PLAN]
