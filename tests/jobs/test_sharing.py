"""Several planners and workers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.context import JobContext
from jobs.errors import RunBusy
from jobs.keys import run_lock_key
from jobs.parquet.enqueue import enqueue_shards
from jobs.parquet.names import PLAN
from jobs.parquet.run_folder import RunFolder
from jobs.parquet.shard_work import trusted_plan
from jobs.parquet.storage import Storage
from jobs.run_state import RunState
from jobs.shared_files import SharedFiles
from tests.jobs.answering import queued_jobs, run_task, score_parquet

MakeContext = Callable[[], JobContext]
ROWS = 60


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, str]:
    table = pa.table({"prompt": [f"p{number}" for number in range(ROWS)], "id": range(ROWS)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=7)
    return str(tmp_path / "in.parquet"), str(tmp_path / "out")


def test_planners_at_once_agree_on_one_plan_and_enqueue_each_shard_once(
    redis: Redis, make_context: MakeContext, arguments: tuple[str, str]
) -> None:
    together = threading.Barrier(4)

    def plan(context: JobContext) -> int:
        together.wait(timeout=30)
        enqueued = score_parquet(context, *arguments, rows_per_shard=2)["shards_enqueued"]
        assert isinstance(enqueued, int)
        return enqueued

    with ThreadPoolExecutor(4) as pool:
        enqueued = list(pool.map(plan, [make_context() for _ in range(4)]))
    assert sum(enqueued) == 30
    assert len({job.id for job in queued_jobs(redis)}) == len(queued_jobs(redis)) == 30


def test_workers_that_share_a_run_and_repeat_each_others_shards_write_each_row_once(
    redis: Redis, make_context: MakeContext, arguments: tuple[str, str]
) -> None:
    score_parquet(make_context(), *arguments, rows_per_shard=3)
    jobs = queued_jobs(redis)
    contexts = [make_context() for _ in range(3 * len(jobs))]
    with ThreadPoolExecutor(4) as pool:
        work = [
            pool.submit(run_task, context, job.func_name, *job.args)
            for context, job in zip(contexts, [*jobs, *reversed(jobs), *jobs], strict=True)
        ]
        results = [future.result(timeout=60) for future in work]
    assert any(result["run_finished"] for result in results)
    output = Path(arguments[1])
    rows = pq.read_table(output).to_pylist()
    assert [(row["id"], row["completion"]) for row in rows] == [(n, f"P{n}") for n in range(ROWS)]
    assert (output / "_SUCCESS").exists()
    assert not list(output.glob("_tmp.*"))


def test_a_planner_that_lost_its_lock_enqueues_nothing_more(
    redis: Redis, make_context: MakeContext, arguments: tuple[str, str]
) -> None:
    context = make_context()
    run = score_parquet(context, *arguments, rows_per_shard=2)["run"]
    redis.delete("rq:queue:bulk")

    class LosesTheLock(RunState):
        def check_not_cancelled(self) -> None:
            redis.set(run_lock_key(run), "another planner's")

    storage = Storage(context.data_roots)
    plan = trusted_plan(storage, f"{arguments[1]}/{PLAN}", run, SharedFiles())
    folder = RunFolder(storage, plan, LosesTheLock(redis, run), "e")
    with pytest.raises(RunBusy):
        enqueue_shards(redis, "bulk", folder, [0])
    assert queued_jobs(redis) == []
    assert redis.get(run_lock_key(run)) == b"another planner's"
