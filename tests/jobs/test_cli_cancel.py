"""`tokenmill cancel`: waiting jobs go, running ones are told, and a later submit resumes the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from rq.executions import Execution

from jobs.context import JobContext
from jobs.errors import RunCancelled
from tests.jobs.answering import queued_jobs, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]


def test_cancel_takes_waiting_jobs_stops_running_ones_and_submit_resumes(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)["run"]
    done, started, *_ = queued_jobs(redis)
    run_task(make_context(), done.func_name, *done.args)
    done.delete()
    redis.lrem("rq:queue:bulk", 1, started.id)
    with redis.pipeline() as pipe:
        execution = Execution.create(started, ttl=60, pipeline=pipe, worker_name="w1")
        pipe.execute()
    with redis.pubsub() as listener:
        listener.subscribe("rq:pubsub:w1")
        assert listener.get_message(timeout=5)["type"] == "subscribe"
        result = invoke("cancel", run)
        message = listener.get_message(timeout=5)
    assert "3 jobs removed, 1 told to stop" in result.stdout
    assert json.loads(message["data"]) == {"command": "stop-job", "job_id": started.id}
    assert queued_jobs(redis) == []
    assert "cancelled" in invoke("status", run).stdout
    with pytest.raises(RunCancelled):  # a shard that was claimed just before
        run_task(make_context(), started.func_name, *started.args)
    with redis.pipeline() as pipe:
        execution.delete(job=started, pipeline=pipe)
        pipe.hset(started.key, "status", "stopped")
        pipe.execute()
    assert score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)["run"] == run
    assert len(queued_jobs(redis)) == 4
    work_off(redis, make_context)
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert "is finished: nothing was left to cancel" in invoke("cancel", run).stdout


def test_cancel_before_planning_removes_the_planning_job(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    assert "1 jobs removed" in invoke("cancel", run).stdout
    assert queued_jobs(redis) == []


def test_a_cancelled_planning_that_its_workers_death_runs_again_does_not_revive_the_run(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    arguments = (str(source), str(tmp_path / "out"))
    planning = make_context()
    run = score_parquet(planning, *arguments, rows_per_shard=1)["run"]
    assert "5 jobs removed" in invoke("cancel", run).stdout
    with pytest.raises(RunCancelled):
        score_parquet(planning, *arguments, rows_per_shard=1)
    assert queued_jobs(redis) == []
    assert "cancelled" in invoke("status", run).stdout
    score_parquet(make_context(), *arguments, rows_per_shard=1)
    assert len(queued_jobs(redis)) == 5


def test_of_a_submitted_run_too_a_second_planning_respects_the_cancellation(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    (job,) = queued_jobs(redis)
    redis.lrem("rq:queue:bulk", 1, job.id)
    redis.hset(job.key, "status", "started")  # by a worker that dies without hearing of the cancellation
    invoke("cancel", run)
    redis.rpush("rq:queue:bulk", job.id)
    with pytest.raises(RunCancelled):
        work_off(redis, make_context)
    redis.delete("rq:queue:bulk")
    redis.hset(job.key, "status", "failed")
    invoke("submit", source, tmp_path / "out")
    for _ in range(2):
        work_off(redis, make_context)
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_folder_can_be_cancelled(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    assert "1 jobs removed" in invoke("cancel", tmp_path / "out").stdout
    assert queued_jobs(redis) == []
