"""A run that is submitted again, or whose input changes: what is right stays, what is not is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import errors
from jobs.cli import commands as cli
from jobs.context.shared_files import SharedFiles
from jobs.parquet.fingerprint import WHOLE_BYTES, file_fingerprint
from jobs.parquet.run_folder import RunFolder
from jobs.parquet.shard_work import ShardWork, trusted_plan
from jobs.parquet.storage import Storage
from jobs.runs.names import PLAN, part_name
from jobs.runs.snapshot import read_snapshot
from jobs.runs.state import RunState
from jobs.watch.runs import list_runs
from tests.jobs.answering import (
    fails,
    feed,
    opened_task,
    shout,
)
from tests.jobs.conftest import MakeContext
from tests.jobs.runs import Runs


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [*"abcdef"]}), path)
    return path


@pytest.fixture
def submit(runs: Runs, source: Path) -> Callable[..., dict[str, object]]:
    def run(**options: object) -> dict[str, object]:
        return runs.plan(source, rows_per_shard=2, **options)

    return run


@pytest.fixture
def run(runs: Runs, submit: Callable[..., dict[str, object]]) -> str:
    """A run of three parts that has finished."""
    planned = submit()
    runs.work()
    return str(planned["run"])


def truncate(part: Path) -> None:
    os.truncate(part, part.stat().st_size // 2)


def replace_by_another_table(part: Path) -> None:
    part.unlink()
    pq.write_table(pa.table({"x": [1, 2]}), part)


def cut_out_data(part: Path) -> None:
    """Keep mark and footer, as a copy that skipped a block may."""
    whole = part.read_bytes()
    part.unlink()
    part.write_bytes(whole[:4] + whole[50:])


@pytest.mark.parametrize(
    "damage",
    [truncate, replace_by_another_table, cut_out_data],
)
def test_a_damaged_part_of_a_finished_run_is_named_and_redone_on_wish(
    runs: Runs,
    redis: Redis,
    submit: Callable[..., dict[str, object]],
    run: str,
    damage: Callable[[Path], None],
) -> None:
    output = runs.output
    damage(output / "part-00001.parquet")
    with pytest.raises(errors.PartDamaged, match=r"part-00001\.parquet.*--redo-damaged"):
        submit()
    assert not read_snapshot(redis, run).finished
    assert list_runs(redis)[0].rows_done == read_snapshot(redis, run).rows_done < 6
    assert not (output / "_SUCCESS").exists()
    assert submit(redo_damaged=True)["shards_enqueued"] == 1
    runs.work()
    assert read_snapshot(redis, run).finished
    assert (output / "_SUCCESS").exists()
    assert pq.read_table(output)["completion"].to_pylist() == [*"ABCDEF"]


def test_a_part_of_another_run_is_no_part_of_this_one(
    runs: Runs, submit: Callable[..., dict[str, object]], run: str, source: Path, tmp_path: Path
) -> None:
    runs.plan(source, tmp_path / "other", rows_per_shard=2)
    runs.work()
    os.replace(tmp_path / "other" / "part-00000.parquet", runs.output / "part-00000.parquet")
    with pytest.raises(errors.PartDamaged, match="belongs to shard 0 of run"):
        submit()


def test_a_refused_submission_leaves_a_finished_run_finished(
    runs: Runs, redis: Redis, redis_url: str, submit: Callable[..., dict[str, object]], run: str, source: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["new"]}), source)
    arguments = ["--url", redis_url, "submit", str(source), str(runs.output), "--rows-per-shard", "2"]
    result = click.testing.CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    assert read_snapshot(redis, run).state == "planning", (
        "nobody who waits takes the former end for this one's"
    )
    with pytest.raises(errors.InputChanged):
        runs.work()
    runs.jobs[0].delete()
    snapshot = read_snapshot(redis, run)
    assert snapshot.finished
    assert snapshot.state == "finished"
    assert (runs.output / "_SUCCESS").exists()


def test_a_touched_input_is_the_same_input(
    runs: Runs, make_context: MakeContext, submit: Callable[..., dict[str, object]], source: Path
) -> None:
    submit()
    first, second, third = runs.jobs
    os.utime(source)
    runs.run(first)
    task = opened_task(make_context(), second.func_name, second.args)
    source.write_bytes(source.read_bytes())  # copied anew while a shard runs
    feed(task)
    task.result()
    task.close()
    assert submit()["shards_missing"] == 1
    assert runs.run(third)["run_finished"]
    assert runs.manifest["rows"] == 6


def test_a_replaced_input_of_the_same_size_is_another_one(
    runs: Runs, submit: Callable[..., dict[str, object]], source: Path
) -> None:
    submit()
    size = source.stat().st_size
    pq.write_table(pa.table({"prompt": [*"abxdef"]}), source)
    assert source.stat().st_size == size
    first = runs.jobs[0]
    with pytest.raises(errors.InputChanged, match="other contents"):
        runs.run(first)
    with pytest.raises(errors.InputChanged, match="other contents"):
        submit()


def test_a_large_files_fingerprint_depends_on_its_footer_and_on_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"x": list(range(20 * WHOLE_BYTES))}), path)
    content = path.read_bytes()
    storage = Storage([str(tmp_path)])
    original = file_fingerprint(storage, str(path))
    for place in (10, len(content) // 3, len(content) - 200):
        changed = bytearray(content)
        changed[place : place + 8] = bytes(8) if any(changed[place : place + 8]) else b"x" * 8
        path.write_bytes(changed)
        assert file_fingerprint(storage, str(path)) != original, f"byte {place} of {len(content)}"
    path.write_bytes(content)
    assert file_fingerprint(storage, str(path)) == original


def change_content(three_rows: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b", "d"], "id": [1, 2, 3]}), three_rows)


def change_rows(three_rows: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "id": [1]}), three_rows)


def remove(three_rows: Path) -> None:
    three_rows.rename(three_rows.with_name("elsewhere"))


@pytest.mark.parametrize("change", [change_content, change_rows])
def test_a_changed_input_stops_resume_and_shards_and_keeps_finished_parts(
    runs: Runs, redis: Redis, make_context: MakeContext, three_rows: Path, change: Callable[[Path], None]
) -> None:
    runs.plan(three_rows, rows_per_shard=1)
    first, second, _ = runs.jobs
    runs.run(first)
    change(three_rows)
    with pytest.raises(errors.InputChanged, match=r"in\.parquet"):
        runs.run(second)
    redis.flushall()
    fails(errors.InputChanged, make_context(), three_rows, runs.output, rows_per_shard=1)
    assert (runs.output / part_name(0)).exists()
    assert not list((runs.output).glob("_tmp.*"))


def test_an_input_that_changes_while_its_shard_runs_is_noticed(
    runs: Runs, redis: Redis, make_context: MakeContext, three_rows: Path
) -> None:
    runs.plan(three_rows)
    (job,) = runs.jobs
    for change in (change_content, remove):
        if change is remove:
            redis.flushall()
            (runs.output / PLAN).unlink()
            runs.plan(three_rows)
        task = opened_task(make_context(), job.func_name, job.args)
        feed(task)
        change(three_rows)
        with pytest.raises(errors.InputChanged):
            task.result()
        task.close()


@pytest.mark.parametrize("row_group_size", [1, 3])  # like the planned file's, so that reading works, or not
def test_an_input_that_is_replaced_while_its_part_is_written_is_not_published(
    runs: Runs, redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path, row_group_size: int
) -> None:
    runs.plan(three_rows)
    (job,) = runs.jobs

    class ReplacedMeanwhile(Storage):
        def open_output(self, path: str) -> Any:
            table = pa.table({"prompt": ["a", "b", "d"], "id": [1, 2, 3]})
            pq.write_table(table, three_rows, row_group_size=row_group_size)
            return super().open_output(path)

    storage = ReplacedMeanwhile((str(tmp_path),))
    plan = trusted_plan(storage, job.args[1], job.args[0], SharedFiles())
    work = ShardWork(make_context(), RunFolder(storage, plan, RunState(redis, plan.run), "e"), 0)
    for index, request in enumerate(work.requests()):
        work.deliver(index, [shout(request)])
    with pytest.raises(errors.InputChanged):
        work.result()
    work.close()
    assert [path.name for path in (runs.output).iterdir()] == [PLAN]
