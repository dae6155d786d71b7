"""Folders and files that are swapped between their check and their use lead nobody out of the data roots."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import errors
from jobs.context import JobContext
from jobs.context.shared_files import SharedFiles
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.run_folder import RunFolder
from jobs.parquet.shard_work import ShardWork, trusted_plan
from jobs.parquet.storage import Storage
from jobs.runs.plans.names import PLAN, part_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.state import RunState
from tests.jobs.answering import queued_jobs, run_task, score_parquet, shout, work_off

MakeContext = Callable[[], JobContext]
Swap = Callable[[], None]


class SwappedBefore(Storage):
    """Calls `swap` once, when a file operation has been asked for and every check before it was made."""

    def __init__(self, roots: tuple[str, ...], operation: str, swap: Swap) -> None:
        super().__init__(roots)
        self.operation, self.swap = operation, swap

    def _meet(self, operation: str) -> None:
        if operation == self.operation:
            self.operation = ""
            self.swap()

    def stat(self, path: str) -> Any:
        self._meet("stat")
        return super().stat(path)

    def names(self, folder: str) -> list[str]:
        self._meet("names")
        return super().names(folder)

    def make_folder(self, path: str) -> None:
        self._meet("make_folder")
        super().make_folder(path)

    def open_input(self, path: str) -> Any:
        self._meet("open_input")
        return super().open_input(path)

    def open_output(self, path: str) -> Any:
        self._meet("open_output")
        return super().open_output(path)

    def publish(self, temporary: str, target: str) -> bool:
        self._meet("publish")
        return super().publish(temporary, target)

    def replace(self, temporary: str, target: str) -> bool:
        self._meet("replace")
        return super().replace(temporary, target)

    def delete(self, path: str) -> None:
        self._meet("delete")
        super().delete(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "in.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), path)
    return path


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


def work_on(context: JobContext, storage: Storage, run: str, output: Path) -> ShardWork:
    """Open the one shard of a run and answer its requests."""
    plan = trusted_plan(storage, str(output / PLAN), run, SharedFiles())
    folder = RunFolder(storage, plan, RunState(context.connection, run), context.execution_id)
    work = ShardWork(context, folder, 0)
    for index, request in enumerate(work.requests()):
        work.deliver(index, [shout(request)])
    return work


def finish(work: ShardWork) -> None:
    work.result()
    work.close()


@pytest.mark.parametrize("operation", ["open_output", "publish", "names", "replace", "delete"])
def test_nothing_of_a_shard_is_written_where_its_folder_is_swapped_for_a_link(
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    outside: Path,
    operation: str,
) -> None:
    output = tmp_path / "out"
    run = score_parquet(make_context(), str(source), str(output))["run"]
    (outside / "_tmp.precious.tmp").touch()  # as what the end of a run removes
    storage = SwappedBefore((str(tmp_path),), operation, lambda: swap_for_link(output, outside))
    work = work_on(make_context(), storage, run, output)
    with pytest.raises(errors.PathSwapped, match=r"out.*is a link now"):
        finish(work)
    assert os.listdir(outside) == ["_tmp.precious.tmp"]
    put_back(output)
    score_parquet(make_context(), str(source), str(output))
    work_off(redis, make_context)
    assert pq.read_table(output)["completion"].to_pylist() == ["A", "B", "C"]
    assert (output / "_SUCCESS").exists()


@pytest.mark.parametrize("operation", ["stat", "make_folder", "open_output", "publish", "delete"])
def test_no_plan_is_written_where_its_folder_is_swapped_for_a_link(
    redis: Redis, context: JobContext, source: Path, tmp_path: Path, outside: Path, operation: str
) -> None:
    above = tmp_path / "team"
    above.mkdir()
    spec = RunSpec.from_arguments(str(source), str(above / "runs" / "out"))
    storage = SwappedBefore((str(tmp_path),), operation, lambda: swap_for_link(above, outside))
    with pytest.raises(errors.PathSwapped, match=r"'team' is a link now"):
        plan_run(context, storage, spec, Submission("bulk"))
    assert os.listdir(outside) == []
    assert queued_jobs(redis) == []


def test_a_part_whose_folder_is_moved_away_while_it_gets_its_name_is_taken_back(
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, moved = tmp_path / "out", outside / "moved"
    run = score_parquet(make_context(), str(source), str(output))["run"]
    work = work_on(make_context(), Storage((str(tmp_path),)), run, output)
    link = os.link

    def link_and_move(*names: Any, **options: Any) -> None:
        link(*names, **options)
        output.rename(moved)
        shutil.copytree(moved, output, ignore=lambda *_: [part_name(0)])  # another folder, by the same name

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link_and_move)
        with pytest.raises(errors.PathSwapped, match=r"moved away"):
            work.result()
    work.close()
    assert os.listdir(moved) == [PLAN]
    assert RunState(redis, run).parts() == {}


def swap_file(source: Path, target: Path) -> None:
    swap_for_link(source, target)


def swap_folder(source: Path, target: Path) -> None:
    swap_for_link(source.parent, target.parent)


@pytest.mark.parametrize("swap", [swap_file, swap_folder])
def test_an_input_that_is_swapped_for_a_link_is_not_read(
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    outside: Path,
    swap: Callable[[Path, Path], None],
) -> None:
    secret = outside / source.name
    shutil.copy2(source, secret)  # so alike that nothing else tells
    spec = RunSpec.from_arguments(str(source), str(tmp_path / "out"))
    storage = SwappedBefore((str(tmp_path),), "open_input", lambda: swap(source, secret))
    with pytest.raises(errors.PathSwapped):
        plan_run(make_context(), storage, spec, Submission("bulk"))
    put_back(source if swap is swap_file else source.parent)
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    storage = SwappedBefore((str(tmp_path),), "", lambda: swap(source, secret))
    plan = trusted_plan(storage, str(tmp_path / "out" / PLAN), run, SharedFiles())
    storage.operation = "open_input"
    with pytest.raises(errors.RunError):
        ShardWork(make_context(), RunFolder(storage, plan, RunState(redis, run), "e"), 0)


@pytest.mark.timeout(10, method="thread")  # a wait in C ends by no signal
def test_an_input_that_becomes_a_fifo_holds_up_nobody(
    context: JobContext, source: Path, tmp_path: Path
) -> None:
    def swap() -> None:
        source.unlink()
        os.mkfifo(source)

    spec = RunSpec.from_arguments(str(source), str(tmp_path / "out"))
    with pytest.raises(errors.InputNotFound):
        plan_run(context, SwappedBefore((str(tmp_path),), "open_input", swap), spec, Submission("bulk"))


def test_a_part_that_is_a_link_is_no_part(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path, outside: Path
) -> None:
    output = tmp_path / "out"
    score_parquet(make_context(), str(source), str(output))
    work_off(redis, make_context)
    (output / part_name(0)).rename(outside / "part")
    (output / part_name(0)).symlink_to(outside / "part")
    with pytest.raises(errors.PartDamaged, match=r"part-00000\.parquet.*is a link"):
        score_parquet(make_context(), str(source), str(output))
    score_parquet(make_context(), str(source), str(output), redo_damaged=True)
    work_off(redis, make_context)
    assert not (output / part_name(0)).is_symlink()
    assert pq.read_table(output).num_rows == 3


@pytest.mark.timeout(10, method="thread")  # as above
@pytest.mark.parametrize("planted", ["link", "fifo", "hard link"])
def test_what_is_planted_under_a_temporary_name_is_replaced(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path, planted: str
) -> None:
    output, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("kept")
    run = score_parquet(make_context(), str(source), str(output))["run"]
    (job,) = queued_jobs(redis)
    context = make_context()
    temporary = output / f"_tmp.{context.execution_id}.{part_name(0)}.tmp"
    if planted == "fifo":
        os.mkfifo(temporary)
    elif planted == "link":
        temporary.symlink_to(victim)
    else:
        temporary.hardlink_to(victim)
    assert run_task(context, job.func_name, *job.args)["run"] == run
    assert victim.read_text() == "kept"
    assert pq.read_table(output).num_rows == 3


def test_a_path_with_dots_is_confined_as_what_it_means(tmp_path: Path, outside: Path) -> None:
    storage = Storage((str(tmp_path),))
    (outside / "x").touch()
    for path in (f"{tmp_path}/../{outside.name}/x", str(outside / "x")):
        with pytest.raises(errors.PathOutsideRoots):
            storage.open_input(path)
