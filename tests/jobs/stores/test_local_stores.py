"""Folders of a disk: without links, of another run, full, or holding what was damaged."""

import errno
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import errors
from jobs.context import JobContext
from jobs.parquet.files import local_files
from jobs.parquet.files.filesystem import NotExclusive
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.part import part_stats, write_part
from jobs.runs.plans.names import JOURNAL, PLAN, part_name
from jobs.runs.plans.spec import RunSpec
from tests.jobs.answering import MODEL, fails
from tests.jobs.killing import Executions, finish
from tests.jobs.local_runs import Runs
from tests.jobs.stored_runs import whole_run


def refusing(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_run_needs_no_links(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    runs.score(runs.write([f"p{n}" for n in range(6)]), rows_per_shard=2)
    assert {str(path.relative_to(runs.output)) for path in runs.output.rglob("*")} == {
        "_keys",
        *whole_run(3),
    }
    assert [row["completion"] for row in runs.rows()] == [f"P{n}" for n in range(6)]


def test_of_many_that_publish_at_once_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_filesystem_that_could_overwrite_a_part_is_refused_by_name(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(local_files, "rename_exclusively", refusing(errno.EINVAL))
    runs.write(["a"])
    with pytest.raises(
        NotExclusive, match="neither hard links nor a rename that keeps an existing"
    ):
        runs.plan()
    assert list(runs.output.iterdir()) == []


def test_a_folder_with_other_files_is_refused(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    assert "thesis.txt" in str(
        fails(errors.OutputHoldsForeignFiles, context, three_rows, tmp_path / "out")
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_written_is_named(
    context: JobContext, three_rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for output in ("file/out", "file", "x" * 300):
        fails(errors.OutputNotWritable, context, three_rows, tmp_path / output)


class FailingStorage(Storage):
    """Every write fails with one error, as on a full or read-only disk."""

    def __init__(self, roots: tuple[str, ...], number: int) -> None:
        super().__init__(roots)
        self._number = number

    def open_output(self, path: str) -> Any:
        super().open_output(path).close()  # the file is there, its contents are not
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, errors.DiskFull), (errno.EROFS, errors.OutputNotWritable)]
)
def test_a_disk_that_refuses_fails_by_name_keeps_parts_and_leaves_no_leftovers(
    runs: Runs, three_rows: Path, number: int, kind: type[errors.JobsError]
) -> None:
    failing = partial(FailingStorage, number=number)
    spec = RunSpec.from_arguments(str(three_rows), str(runs.output), rows_per_shard=2)
    executions = Executions(runs, spec)
    with pytest.raises(kind):
        executions.plan(failing)
    executions.plan()
    runs.run(runs.jobs[0])
    work = executions.open(1, failing)
    with pytest.raises(kind, match=r"submit again"):
        finish(work)
    work.close()
    assert sorted(path.name for path in runs.output.iterdir()) == [
        JOURNAL,
        "_keys",
        PLAN,
        part_name(0),
    ]
    runs.work()
    assert (runs.output / "_SUCCESS").exists()


@pytest.mark.processes
def test_a_file_beyond_what_its_owner_may_write_is_a_full_disk(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.string())])
    batch = pa.record_batch(
        [pa.array([str(number) * 1000 for number in range(1000)])], schema=schema
    )
    stats = part_stats(
        [], MODEL, run="0" * 16, shard=0, generated_tokens=0, started_at=0.0, ended_at=0.0
    )
    storage = Storage((str(tmp_path),))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(errors.DiskFull):
            storage.put(
                str(tmp_path / "part"),
                "own",
                lambda sink: write_part(sink, schema, [batch] * 100, stats),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("damage", ["foreign", "cut", "other rows"])
def test_a_damaged_part_is_named_before_the_run_ends(
    runs: Runs, redis: Redis, three_rows: Path, damage: str
) -> None:
    runs.plan(rows_per_shard=2)
    first, second = runs.jobs
    runs.run(first)
    part = runs.output / part_name(0)
    if damage == "foreign":
        pq.write_table(pa.table({"a": [1]}), part)
    elif damage == "cut":
        part.write_bytes(part.read_bytes()[:-30])
    else:
        metadata = pq.read_metadata(
            part
        ).metadata  # ours among it: all but the rows is as it should be
        pq.write_table(pq.read_table(part).slice(1).replace_schema_metadata(metadata), part)
    with pytest.raises(errors.PartDamaged, match=part_name(0)):
        runs.run(second)
    assert not (runs.output / "_SUCCESS").exists()
    part.unlink()
    redis.flushall()
    runs.score(rows_per_shard=2)
