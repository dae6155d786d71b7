"""Runs on filesystems without hard links, as most network mounts are, and without links at all."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.context import JobContext
from jobs.parquet import exclusive_rename, local_files
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.storage import Storage
from jobs.parquet.store_errors import NotExclusive
from jobs.runs.plans.spec import RunSpec
from tests.jobs.test_kills import finish, open_work

REFUSALS = [errno.EPERM, errno.ENOTSUP, errno.ENOSYS]


def refusing(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    pq.write_table(pa.table({"prompt": [f"p{n}" for n in range(6)]}), tmp_path / "in.parquet")
    return RunSpec.from_arguments(str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=2)


def run(context: JobContext, spec: RunSpec, shards: int = 3) -> bool:
    storage = Storage(context.data_roots)
    plan_run(context, storage, spec, Submission("bulk"))
    for shard in range(shards):
        finish(open_work(context, spec, shard, storage))
    return bool(plan_run(context, storage, spec, Submission("bulk"))["run_finished"])


@pytest.mark.parametrize("number", REFUSALS)
def test_a_run_needs_no_links(
    make_context: Callable[[], JobContext], spec: RunSpec, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", refusing(number))
    monkeypatch.setattr(os, "symlink", refusing(number))
    assert run(make_context(), spec)
    output = Path(spec.output)
    whole = sorted(path.name for path in output.iterdir())
    assert whole == [
        "_SUCCESS",
        "_manifest.json",
        "_plan.json",
        "_report.html",
        *(f"part-0000{n}.parquet" for n in range(3)),
    ]
    (output / "part-00001.parquet").unlink()
    planned = plan_run(make_context(), Storage((str(output.parent),)), spec, Submission("bulk"))
    assert planned["shards_missing"] == 1
    assert not os.path.lexists(output / "_SUCCESS")
    assert run(make_context(), spec)
    assert sorted(path.name for path in output.iterdir()) == whole
    assert pq.read_table(output)["completion"].to_pylist() == [f"P{n}" for n in range(6)]


def test_of_many_that_publish_at_once_one_does(
    context: JobContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    storage, begin, published = Storage((str(tmp_path.resolve()),)), threading.Barrier(8), []
    target = str(tmp_path.resolve() / "part")

    def publish(number: int) -> None:
        temporary = f"{target}.{number}"
        Path(temporary).write_text(str(number))
        begin.wait()
        if storage.publish(temporary, target):
            published.append(number)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [Path(target).read_text()] == [str(number) for number in published]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_filesystem_that_could_overwrite_a_part_is_refused_by_name(
    make_context: Callable[[], JobContext], spec: RunSpec, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(local_files, "rename_exclusively", refusing(number))
    with pytest.raises(NotExclusive, match="neither hard links nor a rename that replaces nothing"):
        run(make_context(), spec)
    assert list(Path(spec.output).iterdir()) == []


def test_the_exclusive_rename_says_what_stands_in_its_way(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        (tmp_path / "a").write_text("a")
        (tmp_path / "ä").write_text("b")
        where = {"src_dir_fd": folder, "dst_dir_fd": folder}
        with pytest.raises(FileExistsError):
            exclusive_rename.rename_exclusively("a", "ä", **where)
        with pytest.raises(FileNotFoundError):
            exclusive_rename.rename_exclusively("c", "d", **where)
        exclusive_rename.rename_exclusively("ä", "ö", **where)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "ö"]
    finally:
        os.close(folder)
