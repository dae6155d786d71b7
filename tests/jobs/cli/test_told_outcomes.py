"""What is told of a run does not take for success what is none: by every surface."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from starlette.testclient import TestClient

import jobs
from jobs.common.rq_jobs import executions_key
from jobs.context import Lease
from jobs.context.checks import Checks
from jobs.errors import InputChanged, RunFailed
from jobs.runs.end_notices import notify_failed
from jobs.runs.watching.reading import list_runs, read_planned
from tests.jobs.answering import FakeCompletion, fail, queued_jobs
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs
from tests.tokenmill.dashboard.pages.test_pages import text_of
from tokenmill.dashboard.app import Dashboard, Options
from tokenmill.dashboard.seen.shards_seen import list_shards


@pytest.fixture
def page(redis: Redis) -> Iterator[TestClient]:
    client = TestClient(Dashboard(redis, Options()).app(), base_url="http://127.0.0.1:9181")
    yield client
    client.close()


def answered(request: Any) -> FakeCompletion:
    """Answers that no check takes but those to "good", and one that is cut."""
    text = "yes" if request.prompt == "good" else "?"
    return FakeCompletion(
        text, 0, [1], "length" if request.prompt.startswith("long") else "stop", 1
    )


def test_rows_that_failed_their_check_or_were_cut_are_counted_on_every_surface(
    redis: Redis, runs: Runs, checks: Checks, invoke: Invoke, page: TestClient
) -> None:
    runs.write(["good", "bad", "bad too", "long", None])
    without_checks = runs.context
    runs.context = lambda: replace(without_checks(), checks=checks)
    name, output = runs.plan(rows_per_shard=2, check={"regex": "yes"})["run"], runs.output
    runs.work(answered)
    told = "1 with an error, 3 failed their check, 1 cut at their limit of tokens"
    assert f"rows     5 of 5, {told}" in invoke("status", name).stdout
    assert told.replace("with", "row with", 1) in invoke("errors", name).stdout
    for command in (("status", name), ("errors", output)):
        as_json = json.loads(invoke(*command, "--json").stdout)
        assert (as_json["errors"], as_json["failed_checks"], as_json["cut"]) == (1, 3, 1)
    assert (runs.manifest["errors"], runs.manifest["failed_checks"], runs.manifest["cut"]) == (
        1,
        3,
        1,
    )
    assert told in (output / "_report.html").read_text()
    shown = text_of(page.get(f"/runs/{name}").text)
    assert "Failed their check 3" in shown
    assert "Cut at their limit 1" in shown
    (listed,) = list_runs(redis)
    assert (listed.errors, listed.failed_checks, listed.cut) == (1, 3, 1)
    redis.flushall()
    assert told.replace("with", "row with", 1) in invoke("errors", output).stdout


def planning_that_failed(redis: Redis, invoke: Invoke, tmp_path: Path) -> tuple[str, Any]:
    """Submit a run whose planning fails, as a worker ends it; return its id and the job."""
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    run = invoke("submit", tmp_path / "in.parquet", tmp_path / "out").stdout.strip()
    (job,) = queued_jobs(redis)
    redis.zadd(executions_key(job.id), {"me": 1})
    notify_failed(redis, Lease(job.id, "me"), "InputNotFound: there is no such file")
    fail(redis, job, "jobs.errors.InputNotFound: there is no such file")
    return run, job


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_whose_planning_failed_says_so_and_why_on_every_surface(
    redis: Redis, invoke: Invoke, page: TestClient, tmp_path: Path, gone: bool
) -> None:
    run, job = planning_that_failed(redis, invoke, tmp_path)
    if gone:
        job.delete()
    why = "InputNotFound: there is no such file"
    status = invoke("status", run)
    assert f"run {run}: failed" in status.stdout
    assert why in status.stdout
    told = json.loads(invoke("status", run, "--json").stdout)
    assert told["state"] == "failed"
    assert why in told["plan_error"]
    errors = invoke("errors", run)
    assert errors.exit_code == 1
    assert "its planning failed: " in errors.output
    assert why in errors.output
    assert [each.state for each in list_runs(redis)] == ["failed"]
    shown = text_of(page.get(f"/runs/{run}").text)
    assert "Its planning failed: " in shown
    assert why in shown
    assert "No row has an error" not in shown
    with pytest.raises(RunFailed, match=why):
        jobs.run(run, connection=redis).wait(sleep=lambda seconds: None)


def test_a_run_whose_queue_was_emptied_before_it_was_planned_has_failed(
    runs: Runs, redis: Redis, invoke: Invoke, page: TestClient, source: Path
) -> None:
    run = invoke("submit", source, runs.output).stdout.strip()
    for job in runs.jobs:
        job.delete()  # what `rq empty` does
    assert f"run {run}: failed" in invoke("status", run).stdout
    assert "submit it again" in invoke("errors", run).output
    assert "submit it again" in text_of(page.get(f"/runs/{run}").text)
    assert [each.state for each in list_runs(redis)] == ["failed"]


def test_shards_whose_jobs_are_gone_are_told_as_that_and_the_submit_that_mends_it(
    runs: Runs, redis: Redis, invoke: Invoke, page: TestClient, three_rows: Path
) -> None:
    arguments = ("submit", three_rows, runs.output, "--rows-per-shard", 1)
    run = invoke(*arguments).stdout.strip()
    runs.work()
    for job in runs.jobs:
        job.delete()  # what `rq empty` does
    redis.rpush("rq:queue:bulk", "another's")
    status = invoke("status", run).stdout
    assert f"run {run}: failed" in status
    assert "0 queued, 0 failed, 3 whose jobs are gone" in status
    assert "the jobs of 3 of the run's shards are gone from queue 'bulk'" in status
    assert "submit the run again" in status
    assert [each.state for each in list_shards(redis, run)] == ["gone"] * 3
    assert [each.state for each in list_runs(redis)] == ["failed"]
    assert "are gone from queue" in text_of(page.get(f"/runs/{run}").text)
    redis.delete("rq:queue:bulk")
    invoke(*arguments)
    runs.work()
    runs.work()
    assert read_planned(redis, run).state == "finished"


def test_a_refused_submit_of_a_finished_run_says_that_the_run_is_finished_as_before(
    runs: Runs, redis: Redis, invoke: Invoke, page: TestClient, source: Path
) -> None:
    run = invoke("submit", source, runs.output).stdout.strip()
    for _ in range(2):
        runs.work()
    runs.write(["new"])
    invoke("submit", source, runs.output)
    assert read_planned(redis, run).state == "planning", (
        "nobody takes the former end for this one's"
    )
    with pytest.raises(InputChanged):
        runs.work()
    assert (runs.output / "_SUCCESS").exists()
    (job,) = runs.jobs
    fail(redis, job, "jobs.errors.InputChanged: it is another file")
    status = invoke("status", run)
    assert f"run {run}: finished" in status.stdout
    assert (
        "the last submit was refused: jobs.errors.InputChanged: it is another file" in status.stdout
    )
    assert "the run is finished as before" in status.stdout
    assert "The run is finished as before" in text_of(page.get(f"/runs/{run}").text)
    with pytest.raises(RunFailed, match=r"it is another file; .* the run is finished as before"):
        jobs.run(run, connection=redis).wait(sleep=lambda seconds: None)
