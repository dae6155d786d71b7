"""Who is told of a run's end is told that it has failed, once for each submission."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.command import send_stop_job_command
from rq.job import Job

from jobs.common.keys import run_failed_key, run_key
from jobs.common.rq_jobs import executions_key
from jobs.context import JobContext, Lease
from jobs.errors import OutputNotWritable, RunKeyDamaged
from jobs.runs.control import submit_run
from jobs.runs.end_notices import tell_failed, tells_of
from jobs.runs.plans.names import plan_job_id, shard_job_id
from jobs.runs.redis_state.end_calls import TOLD
from jobs.runs.redis_state.state import RunState
from tests.forking import ForkedWorkers
from tests.jobs.answering import fail as write_failure
from tests.jobs.answering import queued_jobs, run_task, work_off
from tests.jobs.conftest import Invoke
from tests.rq_workers import Workers, wait_until
from tests.worker.webhook_server import webhook_server

MakeContext = Callable[[], JobContext]
ON_END = "mine.done"
HOLDER = "execution"


@pytest.fixture
def make_context(make_context: MakeContext) -> MakeContext:
    return lambda: replace(make_context(), allowed_functions=frozenset({ON_END}))


@pytest.fixture
def planned(redis: Redis, invoke: Invoke, make_context: MakeContext, three_rows: Path, tmp_path: Path) -> str:
    """A run of three shards that has been planned."""
    return submit(redis, invoke, make_context, three_rows, tmp_path / "out")


def submit(
    redis: Redis, invoke: Invoke, make_context: MakeContext, source: Path, output: Path, *options: str
) -> str:
    given = options or ("--on-end", ON_END)
    told = invoke("submit", source, output, "--rows-per-shard", 1, *given)
    assert told.exit_code == 0, told.output
    work_off(redis, make_context)
    return str(told.stdout.split()[0])


def fail(redis: Redis, job_id: str, error: str = "PartDamaged: it is cut") -> None:
    """What a worker that holds the job does before it writes such an end."""
    redis.zadd(executions_key(job_id), {HOLDER: 1})
    tell_failed(redis, job_id, Lease(executions_key(job_id), HOLDER), error)


def succeed(redis: Redis, make_context: MakeContext, job_id: str) -> None:
    (job,) = [job for job in queued_jobs(redis) if job.id == job_id]
    run_task(make_context(), job.func_name, *job.args)


def told(redis: Redis) -> list[dict[str, Any]]:
    return [job.args[0] for job in queued_jobs(redis) if job.func_name == ON_END]


def test_the_last_shard_to_fail_tells_and_the_others_do_not(
    redis: Redis, make_context: MakeContext, planned: str, tmp_path: Path
) -> None:
    first, second, third = (shard_job_id(planned, shard) for shard in range(3))
    fail(redis, first)
    succeed(redis, make_context, second)
    assert told(redis) == []
    for _ in range(2):  # as where its worker was killed before it wrote the end
        fail(redis, third)
    assert told(redis) == [
        {
            "run": planned,
            "state": "failed",
            "output": str(tmp_path / "out"),
            "rows": 3,
            "rows_done": 1,
            "errors": 0,
            "shards": 3,
            "reason": "2 of 3 shards failed, the last one: PartDamaged: it is cut",
        }
    ]


def test_a_shard_that_succeeds_last_tells_of_those_that_have_failed(
    redis: Redis, make_context: MakeContext, planned: str
) -> None:
    fail(redis, shard_job_id(planned, 1))
    for shard in (0, 2):
        assert told(redis) == []
        succeed(redis, make_context, shard_job_id(planned, shard))
    (content,) = told(redis)
    assert (content["state"], content["reason"]) == ("failed", "1 of 3 shards failed")


def test_a_run_that_is_finished_after_all_is_told_as_such_too(
    redis: Redis, make_context: MakeContext, planned: str
) -> None:
    for shard in range(3):
        fail(redis, shard_job_id(planned, shard))
    for shard in range(3):  # `rq requeue`
        succeed(redis, make_context, shard_job_id(planned, shard))
    assert [content["state"] for content in told(redis)] == ["failed", "finished"]


def test_a_shard_that_succeeds_after_all_counts_as_failed_no_more(
    redis: Redis, make_context: MakeContext, planned: str
) -> None:
    first, second, third = (shard_job_id(planned, shard) for shard in range(3))
    fail(redis, first)
    succeed(redis, make_context, first)  # `rq requeue`
    fail(redis, second)
    assert told(redis) == [], "the third one is still to run"
    fail(redis, third)
    assert told(redis)[0]["reason"].startswith("2 of 3 shards failed")


def test_the_stops_of_a_cancel_tell_of_no_failure_before_it_tells_of_itself(
    redis: Redis, planned: str
) -> None:
    state = RunState(redis, planned)
    with state.lock() as lock:
        state.cancel(lock, state.submission())
    for shard in range(3):
        fail(redis, shard_job_id(planned, shard), "it was stopped")
    assert told(redis) == []


def test_each_submission_is_told_of_its_own_failure(
    redis: Redis, invoke: Invoke, make_context: MakeContext, three_rows: Path, tmp_path: Path, planned: str
) -> None:
    for _ in range(2):
        for shard in range(3):
            fail(redis, shard_job_id(planned, shard))
        for job in queued_jobs(redis):
            if job.func_name != ON_END:
                job.delete()
        ends = [job.id for job in queued_jobs(redis)]
        redis.delete("rq:queue:bulk", *(executions_key(shard_job_id(planned, each)) for each in range(3)))
        submit(redis, invoke, make_context, three_rows, tmp_path / "out")
        redis.lpush("rq:queue:bulk", *ends)
    assert [content["reason"][:6] for content in told(redis)] == ["3 of 3"] * 2
    fail(redis, shard_job_id(planned, 0))
    assert len(told(redis)) == 2, "what failed in an earlier submission counts in this one"


def test_planning_that_fails_is_told(
    redis: Redis, invoke: Invoke, make_context: MakeContext, three_rows: Path, tmp_path: Path
) -> None:
    run = invoke("submit", three_rows, tmp_path / "out", "--on-end", ON_END).stdout.strip()
    fail(redis, plan_job_id(run), "MissingColumn: no column 'prompt'")
    fail(redis, f"{plan_job_id(run)}-webhook")  # no job of a run
    (content,) = told(redis)
    assert (content["state"], content["rows"], content["shards"]) == ("failed", None, None)
    assert content["reason"] == "its planning failed: MissingColumn: no column 'prompt'"


def test_no_failure_is_told_of_what_was_cancelled_or_asked_for_nothing_or_is_anothers_job_by_now(
    redis: Redis, invoke: Invoke, make_context: MakeContext, three_rows: Path, tmp_path: Path, planned: str
) -> None:
    lost = shard_job_id(planned, 0)
    tell_failed(redis, lost, Lease(executions_key(lost), "another"), "x")
    assert not redis.exists(run_failed_key(planned))
    invoke("cancel", planned)
    for shard in range(3):  # the stops reach them
        fail(redis, shard_job_id(planned, shard), "it was stopped")
    assert [content["state"] for content in told(redis)] == ["cancelled"]
    redis.delete("rq:queue:bulk")
    run = submit(redis, invoke, make_context, three_rows, tmp_path / "other", "--max-errors", "1")
    for shard in range(3):
        fail(redis, shard_job_id(run, shard))
    assert not redis.exists(run_failed_key(run))
    fail(redis, shard_job_id("0" * 16, 0))  # of a run that this Redis does not know
    assert told(redis) == []


def test_a_shard_that_has_a_part_is_not_counted_as_failed(
    redis: Redis, make_context: MakeContext, planned: str
) -> None:
    """A frozen execution's job was run by another one, which has ended it."""
    succeed(redis, make_context, shard_job_id(planned, 0))
    for shard in (0, 1):
        fail(redis, shard_job_id(planned, shard))
    assert told(redis) == []


def test_a_run_whose_end_cannot_be_written_is_told_and_shown_as_failed_with_the_reason(
    redis: Redis, invoke: Invoke, make_context: MakeContext, planned: str, tmp_path: Path
) -> None:
    (tmp_path / "out" / "_manifest.json").mkdir()
    first, second, third = (shard_job_id(planned, shard) for shard in range(3))
    succeed(redis, make_context, first)
    succeed(redis, make_context, second)
    assert f"run {planned}: running" in invoke("status", planned).stdout
    (job,) = [job for job in queued_jobs(redis) if job.id == third]
    with pytest.raises(OutputNotWritable) as caught:
        succeed(redis, make_context, third)
    redis.lrem("rq:queue:bulk", 1, third)
    error = f"{type(caught.value).__name__}: {caught.value}"
    for _ in range(2):
        fail(redis, third, error)
    write_failure(redis, job, error)
    (content,) = told(redis)
    assert (content["state"], content["rows_done"]) == ("failed", 3)
    assert content["reason"] == f"all 3 parts are there, and the run's end is not: {error}"
    redis.delete("rq:queue:bulk", executions_key(third))
    shown = invoke("status", planned)
    assert f"run {planned}: failed" in shown.stdout
    assert f"{third}: {error.splitlines()[0]}" in shown.stderr
    (tmp_path / "out" / "_manifest.json").rmdir()
    submit(redis, invoke, make_context, tmp_path / "in.parquet", tmp_path / "out")
    assert [each["state"] for each in told(redis)] == ["finished"]
    write_failure(redis, job, error)
    shown = invoke("status", planned)
    assert f"run {planned}: finished" in shown.stdout
    assert third not in shown.stderr
    redis.hdel(run_key(planned), TOLD)
    fail(redis, third, error)
    assert [each["state"] for each in told(redis)] == ["finished"], "it has finished, whoever fails now"


def test_a_shard_ends_where_redis_has_lost_whom_to_tell_that_others_failed(
    redis: Redis, make_context: MakeContext, planned: str
) -> None:
    fail(redis, shard_job_id(planned, 0))
    succeed(redis, make_context, shard_job_id(planned, 1))
    redis.delete(run_key(planned))
    succeed(redis, make_context, shard_job_id(planned, 2))
    assert told(redis) == []


def test_a_key_of_another_type_in_its_place_is_named(redis: Redis, planned: str) -> None:
    redis.set(run_failed_key(planned), "x")
    with pytest.raises(RunKeyDamaged, match="is a string in this Redis, expected a set"):
        fail(redis, shard_job_id(planned, 0))


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [
        ("0123456789abcdef-00007", True),
        ("0123456789abcdef-plan", True),
        ("0123456789abcdef-webhook-7", False),
        ("0123456789abcdef-failed-end-7", False),
        ("mine-7", False),
        ("\n", False),
    ],
)
def test_only_jobs_that_plan_a_run_or_are_its_shards_are_looked_at(job_id: str, expected: bool) -> None:
    assert tells_of(job_id) is expected


@pytest.fixture
def workers(redis: Redis, redis_url: str, tmp_path: Path) -> Iterator[Workers]:
    started = ForkedWorkers(redis_url, tmp_path)
    yield started
    started.close()


def test_a_worker_tells_of_a_planning_that_fails_and_of_a_last_shard_that_is_stopped(
    workers: Workers, redis: Redis, invoke: Invoke, tmp_path: Path
) -> None:
    gate, source = tmp_path / "gate", tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"file:{gate}", "b"]}), source)
    workers.start(TOKENMILL_ALLOWED_WEBHOOK_HOSTS="127.0.0.1")
    with webhook_server() as server:
        arguments = {"input": str(source), "output": str(tmp_path / "refused"), "prompt_column": "none"}
        refused = submit_run(redis, "bulk", webhook=server.url, **arguments)
        wait_until(lambda: server.received)
        (content,) = server.received
        assert (content["run"], content["state"]) == (refused, "failed")
        assert "its planning failed: MissingColumn" in content["reason"]

        ends = ("--rows-per-shard", 1, "--webhook", server.url)
        run = invoke("submit", source, tmp_path / "out", *ends).stdout.strip()
        stopped = shard_job_id(run, 0)
        wait_until(lambda: (tmp_path / "out" / "part-00001.parquet").exists())
        wait_until(lambda: workers.job(shard_job_id(run, 1)).get_status() == "finished")
        wait_until(lambda: Job.exists(stopped, redis) and workers.job(stopped).get_status() == "started")
        send_stop_job_command(redis, stopped)
        wait_until(lambda: len(server.received) == 2)
        assert server.received[1]["reason"] == "1 of 2 shards failed, the last one: it was stopped"
        assert (server.received[1]["run"], server.received[1]["rows_done"]) == (run, 1)
        wait_until(lambda: workers.job(stopped).get_status() == "stopped")
