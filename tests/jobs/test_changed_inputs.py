"""An input that changes after its run was planned: named, and nothing of it is published."""

from __future__ import annotations

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
from jobs.parquet.run_folder import RunFolder
from jobs.parquet.shard_work import ShardWork, trusted_plan
from jobs.parquet.storage import Storage
from jobs.runs.plans.names import PLAN, part_name
from jobs.runs.redis_state.state import RunState
from tests.jobs.answering import (
    fails,
    feed,
    opened_task,
    queued_jobs,
    run_task,
    score_parquet,
    shout,
)

MakeContext = Callable[[], JobContext]


def change_content(three_rows: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b", "d"], "id": [1, 2, 3]}), three_rows)


def change_rows(three_rows: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "id": [1]}), three_rows)


def remove(three_rows: Path) -> None:
    three_rows.rename(three_rows.with_name("elsewhere"))


@pytest.mark.parametrize("change", [change_content, change_rows])
def test_a_changed_input_stops_resume_and_shards_and_keeps_finished_parts(
    redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    score_parquet(make_context(), str(three_rows), str(tmp_path / "out"), rows_per_shard=1)
    first, second, _ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    change(three_rows)
    with pytest.raises(errors.InputChanged, match=r"in\.parquet"):
        run_task(make_context(), second.func_name, *second.args)
    redis.flushall()
    fails(errors.InputChanged, make_context(), three_rows, tmp_path / "out", rows_per_shard=1)
    assert (tmp_path / "out" / part_name(0)).exists()
    assert not list((tmp_path / "out").glob("_tmp.*"))


def test_an_input_that_changes_while_its_shard_runs_is_noticed(
    redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(three_rows), str(tmp_path / "out"))
    (job,) = queued_jobs(redis)
    for change in (change_content, remove):
        if change is remove:
            redis.flushall()
            (tmp_path / "out" / PLAN).unlink()
            score_parquet(make_context(), str(three_rows), str(tmp_path / "out"))
        task = opened_task(make_context(), job.func_name, job.args)
        feed(task)
        change(three_rows)
        with pytest.raises(errors.InputChanged):
            task.result()
        task.close()


@pytest.mark.parametrize("row_group_size", [1, 3])  # like the planned file's, so that reading works, or not
def test_an_input_that_is_replaced_while_its_part_is_written_is_not_published(
    redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path, row_group_size: int
) -> None:
    score_parquet(make_context(), str(three_rows), str(tmp_path / "out"))
    (job,) = queued_jobs(redis)

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
    assert [path.name for path in (tmp_path / "out").iterdir()] == [PLAN]


def test_a_file_added_to_the_folder_is_a_changed_input(
    redis: Redis, make_context: MakeContext, three_rows: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), f"{tmp_path}/*.parquet", str(tmp_path / "out"))
    redis.flushall()
    (tmp_path / "new.parquet").write_bytes(three_rows.read_bytes())
    error = fails(errors.InputChanged, make_context(), f"{tmp_path}/*.parquet", tmp_path / "out")
    assert "new.parquet" in str(error)
