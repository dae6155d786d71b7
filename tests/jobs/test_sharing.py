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
from redis.lock import Lock

from jobs.common.keys import run_lock_key
from jobs.context import JobContext
from jobs.context.shared_files import SharedFiles
from jobs.errors import RunBusy, RunCancelled
from jobs.parquet.shard_work import trusted_plan
from jobs.parquet.storage import Storage
from jobs.runs.plans.names import PLAN
from jobs.runs.redis_state.shard_jobs import enqueue_shards
from jobs.runs.redis_state.state import RunState
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


def enqueue_again(
    redis: Redis, context: JobContext, arguments: tuple[str, str], state: type[RunState]
) -> int:
    """Plan a run, empty its queue, and enqueue its shards with another kind of state."""
    run = score_parquet(context, *arguments, rows_per_shard=2)["run"]
    redis.delete("rq:queue:bulk")
    storage = Storage(context.data_roots)
    plan = trusted_plan(storage, f"{arguments[1]}/{PLAN}", run, SharedFiles())
    return enqueue_shards(context, "bulk", plan, state(redis, run), [0])


def test_a_planner_that_lost_its_lock_enqueues_nothing_more(
    redis: Redis, make_context: MakeContext, arguments: tuple[str, str]
) -> None:
    class LosesTheLock(RunState):
        def keep(self, lock: Lock) -> None:
            redis.set(run_lock_key(self.run), "another planner's")
            super().keep(lock)

    with pytest.raises(RunBusy):
        enqueue_again(redis, make_context(), arguments, LosesTheLock)
    assert queued_jobs(redis) == []
    (lock,) = redis.keys("*lock*")
    assert redis.get(lock) == b"another planner's"


def test_a_planner_whose_lock_ran_out_goes_on_where_nobody_has_it(
    redis: Redis, make_context: MakeContext, arguments: tuple[str, str]
) -> None:
    class IsSlow(RunState):
        def keep(self, lock: Lock) -> None:
            redis.delete(run_lock_key(self.run))
            super().keep(lock)

    assert enqueue_again(redis, make_context(), arguments, IsSlow) == 1
    assert redis.keys("*lock*") == []


def test_a_slow_planner_sees_what_was_cancelled_meanwhile(
    redis: Redis, make_context: MakeContext, arguments: tuple[str, str]
) -> None:
    class IsSlow(RunState):
        def keep(self, lock: Lock) -> None:
            redis.delete(run_lock_key(self.run))
            canceller = RunState(redis, self.run)
            with canceller.lock() as theirs:
                canceller.cancel(theirs, canceller.submission())
            super().keep(lock)

    with pytest.raises(RunCancelled):
        enqueue_again(redis, make_context(), arguments, IsSlow)
    assert queued_jobs(redis) == []
