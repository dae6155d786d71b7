"""`tokenmill status`: what it tells of a run, by its id and by its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from redis import Redis
from rq.job import JobStatus
from rq.results import Result

from jobs.common.keys import SUBMISSION_FIELD, run_key, run_parts_key
from jobs.context import JobContext
from jobs.runs.redis_state.state import RunState
from jobs.runs.watching.snapshot import read_snapshot
from tests.jobs.answering import fail, queued_jobs, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]


def test_status_counts_what_is_done_started_queued_and_failed(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)["run"]
    done, started, failed, *_ = queued_jobs(redis)
    run_task(make_context(), done.func_name, *done.args)
    redis.lrem("rq:queue:bulk", 1, started.id)
    redis.hset(started.key, mapping={"status": "started", "meta": '{"rows_done": 1, "tokens": 9}'})
    redis.zadd("rq:wip:bulk", {f"{started.id}:abc": 9e12, "other:x": 9e12})
    fail(redis, failed, "jobs.errors.InputChanged: it changed")
    result = invoke("status", run)
    assert result.exit_code == 0
    assert f"run {run}: running" in result.stdout
    assert "rows     2 of 5, 0 with an error" in result.stdout
    assert "shards   1 of 5 done, 1 started, 2 queued, 1 failed" in result.stdout
    assert "tokens   10 generated" in result.stdout
    assert f"{failed.id}: jobs.errors.InputChanged: it changed" in result.stderr


def test_status_before_planning_and_after_the_end(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    assert "planning" in invoke("status", run).stdout
    work_off(redis, make_context)
    work_off(redis, make_context)
    text = invoke("status", run).stdout
    assert "finished" in text
    assert "rows     5 of 5, 1 with an error" in text
    assert f"`tokenmill errors {run}`" in text


def test_status_survives_redis_losing_the_runs_keys(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)["run"]
    redis.delete(run_key(run))
    first, *rest = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    state = RunState(redis, run)
    state.mark_finished(state.end())  # all that Redis would know if the last shard had ended now
    assert "knows no run" in invoke("status", run).output
    redis.delete(run_key(run), run_parts_key(run))
    for job in rest:
        run_task(make_context(), job.func_name, *job.args)
    assert "rows     5 of 5" in invoke("status", run).stdout
    assert "finished" in invoke("status", run).stdout


def test_status_of_a_folder_needs_no_key_in_redis(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)["run"]
    assert f"run {run}: running" in invoke("status", tmp_path / "out").stdout
    first, *rest = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    redis.delete(run_key(run), run_parts_key(run))
    text = invoke("status", tmp_path / "out").stdout
    assert "shards   1 of 3 done" in text
    assert "submit it again" in text
    for job in rest:
        run_task(make_context(), job.func_name, *job.args)
    redis.flushall()
    text = invoke("status", tmp_path / "out").stdout
    assert f"run {run}: finished" in text
    assert "rows     5, 1 with an error" in text
    (tmp_path / "out" / "_plan.json").write_text("{")
    assert "PlanDamaged" in invoke("status", tmp_path / "out").output


def test_what_redis_refuses_is_one_line(invoke: Invoke, redis: Redis) -> None:
    redis.hset(run_key("0" * 16), mapping={"output": "/out", "queue": "bulk"})
    redis.set("rq:wip:bulk", "no sorted set")
    result = invoke("status", "0" * 16)
    assert result.exit_code == 1
    assert "Redis refused (ResponseError)" in result.output


def test_a_worker_with_other_real_paths_is_followed(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    (job,) = queued_jobs(redis)
    other = score_parquet(make_context(), str(source), str(tmp_path / "elsewhere"))["run"]
    redis.lrem("rq:queue:bulk", 1, job.id)
    job.set_status(JobStatus.FINISHED)
    Result.create(job, Result.Type.SUCCESSFUL, ttl=600, return_value={"run": other})
    assert f"run {other}" in invoke("status", run).stdout


def test_snapshots_need_few_round_trips(redis: Redis, make_context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"] * 300}), tmp_path / "in.parquet")
    run = score_parquet(
        make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=1
    )["run"]
    before = redis.info("commandstats")
    snapshot = read_snapshot(redis, run)
    after = redis.info("commandstats")
    assert snapshot.queued == 300
    calls = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after}
    assert sum(calls.values()) < 15


def test_what_others_wrote_into_a_run_steers_no_terminal(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    (job,) = queued_jobs(redis)
    fail(redis, job, "ValueError: \x1b[2J\x1b]0;title\x07" + "x" * 5000)
    redis.hset(run_key(run), mapping={"output": "a\nrows  5 of 5\x1b[1m", "plan_model": "\x9b2J"})
    shown = invoke("status", run)
    assert r"output   a\nrows  5 of 5\x1b[1m" in shown.output
    assert r"planning: ValueError: \x1b[2J\x1b]0;title\x07xxx" in shown.stderr
    refused = invoke("status", "no\x1b[2Jsuch\nrun")
    assert refused.exit_code == 1
    for line in (shown.output + refused.output).split("\n"):
        assert line.isprintable()
        assert len(line) < 3000


def test_status_does_not_call_a_run_finished_whose_part_is_gone(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    run = score_parquet(make_context(), str(source), str(output), rows_per_shard=2)["run"]
    work_off(redis, make_context)
    assert f"run {run}: finished" in invoke("status", run).stdout
    (output / "part-00001.parquet").unlink()
    for name in (run, output, output):
        text = invoke("status", name).stdout
        assert f"run {run}: incomplete" in text
        assert "1 parts are gone: submit it again" in text
        if name == output:
            redis.flushall()
    assert invoke("submit", source, output, "--rows-per-shard", 2).exit_code == 0
    work_off(redis, make_context)
    work_off(redis, make_context)
    assert f"run {run}: finished" in invoke("status", run).stdout


def test_what_an_earlier_cancel_stopped_is_no_failure_of_the_run_that_is_resumed(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    submit = ("submit", source, tmp_path / "out", "--rows-per-shard", 2)
    run = str(invoke(*submit).stdout.strip())
    work_off(redis, make_context)
    stopped, failed, _ = queued_jobs(redis)
    for job in (stopped, failed):  # as a worker ends them
        job.set_status(JobStatus.STOPPED)
        redis.zadd("rq:failed:bulk", {job.id: 1e12})
        redis.lrem("rq:queue:bulk", 1, job.id)
    invoke("cancel", run)
    invoke(*submit)
    redis.hset(f"rq:job:{failed.id}", SUBMISSION_FIELD, 10**15)  # it has failed since
    snapshot = read_snapshot(redis, run)
    assert snapshot.failures == (failed.id,)
    told = invoke("status", run).output
    assert failed.id in told
    assert stopped.id not in told
