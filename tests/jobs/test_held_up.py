"""What `tokenmill submit` and `status` say of a run that is refused, over, or held up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis
from rq.job import JobStatus
from rq.results import Result

from jobs.cli import waiting
from jobs.common.keys import WORKER_STATS_TTL_S, run_key, run_parts_key
from jobs.context import JobContext
from tests.jobs.answering import add_worker, fail, queued_jobs, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]


def test_a_folder_names_its_run_before_it_is_planned_and_however_it_is_written(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    monkeypatch.chdir(tmp_path)
    for name in ("out", "out/", "./out", f"{tmp_path}/out/"):
        assert f"run {run}: planning" in invoke("status", name).stdout
    assert "1 jobs removed" in invoke("cancel", "out/").stdout


def test_a_folder_can_be_cancelled_that_redis_has_lost_all_but_the_jobs_of(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)["run"]
    redis.delete(run_key(run), run_parts_key(run))
    assert "3 jobs removed" in invoke("cancel", tmp_path / "out").stdout
    assert "cancelled" in invoke("status", tmp_path / "out").stdout
    redis.flushall()
    result = invoke("cancel", tmp_path / "out")
    assert result.exit_code == 1
    assert "knows no run" in result.output


def test_submit_waits_for_the_verdict_of_a_planning_that_is_soon_there(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_worker(redis, "w")

    def planning_fails(seconds: float) -> None:
        fail(redis, queued_jobs(redis)[0], "jobs.errors.MissingColumn: no column 'prompt'\ntokenmill: client")

    monkeypatch.setattr(waiting.time, "sleep", planning_fails)
    result = invoke("submit", source, tmp_path / "out")
    assert result.exit_code == 1
    assert "planning: jobs.errors.MissingColumn: no column 'prompt'" in result.stderr
    assert result.stdout == ""


def test_submit_gives_the_id_of_a_run_whose_planning_takes_long(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_worker(redis, "w")
    monkeypatch.setattr(waiting, "PLAN_WAIT_S", 0.0)
    result = invoke("submit", source, tmp_path / "out")
    assert result.exit_code == 0
    assert len(result.stdout.strip()) == 16


def test_a_column_that_is_not_there_is_refused_before_anything_is_queued(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    for options in (["--prompt-column", "text"], ["--template", "{text}"], ["--messages-column", "text"]):
        result = invoke("submit", source, tmp_path / "out", *options)
        assert result.exit_code == 1
        assert "MissingColumn: no column 'text'" in result.output
    assert queued_jobs(redis) == []


def test_an_input_that_is_not_on_this_machine_is_left_to_the_workers(
    invoke: Invoke, redis: Redis, tmp_path: Path
) -> None:
    assert invoke("submit", tmp_path / "elsewhere.parquet", tmp_path / "out").exit_code == 0
    assert len(queued_jobs(redis)) == 1


def plan_as_a_worker(redis: Redis, make_context: MakeContext) -> None:
    """Carry out the planning that waits, and leave its result."""
    (job,) = queued_jobs(redis)
    redis.lrem("rq:queue:bulk", 1, job.id)
    context = replace(make_context(), job_id=job.id)
    value = score_parquet(context, *job.args, **job.kwargs)
    job.set_status(JobStatus.FINISHED)
    Result.create(job, Result.Type.SUCCESSFUL, ttl=600, return_value=value)


@pytest.mark.parametrize("options", [(), ("--wait",)])
def test_submitting_a_finished_run_says_that_it_is_already_finished(
    invoke: Invoke,
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    work_off(redis, make_context)
    add_worker(redis, "w")
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: plan_as_a_worker(redis, make_context))
    result = invoke("submit", source, tmp_path / "out", *options)
    assert result.exit_code == 0
    assert "the run is already finished: its 5 rows are in" in result.stderr


def test_status_says_that_no_worker_listens_and_on_which_queues_workers_do(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    redis.sadd("rq:workers", "rq:worker:w", "rq:worker:dead")
    redis.hset("rq:worker:w", "queues", "prompts,bulk")
    result = invoke("submit", source, tmp_path / "out", "--queue", "bluk")
    says = "no worker listens on queue 'bluk' (workers listen on 'bulk', 'prompts'): start one with"
    assert says in result.stderr
    assert says in invoke("status", tmp_path / "out").stdout


def test_status_says_behind_how_many_jobs_and_which_run_a_run_is(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    add_worker(redis, "w")
    first = score_parquet(make_context(), str(source), str(tmp_path / "first"), rows_per_shard=1)["run"]
    score_parquet(make_context(), str(source), str(tmp_path / "second"))
    says = f"waits    it is behind 5 waiting and 0 running jobs on queue 'bulk', of run {first} among others"
    assert says in invoke("status", tmp_path / "second").stdout
    started = queued_jobs(redis)[0]
    redis.lrem("rq:queue:bulk", 1, started.id)
    redis.zadd("rq:wip:bulk", {f"{started.id}:e": 9e12})
    assert "behind 4 waiting and 1 running jobs" in invoke("status", tmp_path / "second").stdout
    assert "it is behind" not in invoke("status", tmp_path / "first").stdout


def test_status_says_that_no_worker_listens_also_where_every_shard_is_a_dead_ones(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    (job,) = queued_jobs(redis)
    redis.lrem("rq:queue:bulk", 1, job.id)
    redis.zadd("rq:wip:bulk", {f"{job.id}:e": 9e12})
    assert "waits    no worker listens on queue 'bulk'" in invoke("status", tmp_path / "out").stdout
    add_worker(redis, "w")
    assert "waits" not in invoke("status", tmp_path / "out").stdout


def test_status_names_the_silent_worker_that_holds_shards_and_says_when_others_take_them_over(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)
    add_worker(redis, "w")
    for name, job in zip(("dead", "alive"), queued_jobs(redis), strict=False):
        redis.lrem("rq:queue:bulk", 1, job.id)
        redis.zadd("rq:wip:bulk", {f"{job.id}:e": 9e12})
        redis.hset(f"rq:execution:{job.id}:e", "worker_name", name)
        redis.expire(f"rq:execution:{job.id}:e", 60)
    redis.set("tokenmill:worker:alive", "{}", ex=WORKER_STATS_TTL_S)
    redis.set("tokenmill:worker:dead", "{}", ex=WORKER_STATS_TTL_S - 400)
    text = invoke("status", tmp_path / "out").stdout
    assert re.search(r"worker 'dead', silent for 4\d\d s, holds 1 of its shards: .* in about \d+ s", text)
    assert "'alive'" not in text
