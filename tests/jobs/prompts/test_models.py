"""A run is one model's, and a job may name the model it wants."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.common.keys import MODEL_FIELD, SILENT_S, WORKER_STATS_TTL_S, run_key, worker_key
from jobs.common.release import commit
from jobs.common.workers import other_length_text, read_workers
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import ModelNotServed, RunOfAnotherModel
from jobs.runs.control import submit_run
from jobs.runs.watching.reading import read_snapshot
from tests.jobs.answering import MODEL, add_worker, run_task, score_parquet
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs

OTHER = ServedModel("other", "fingerprint of other", "bfloat16", "none")


@pytest.fixture
def source(runs: Runs) -> Path:
    return runs.write([*"abcdef"])


@pytest.fixture
def serving_other(make_context: MakeContext) -> MakeContext:
    return lambda: replace(make_context(), model=OTHER)


@pytest.mark.parametrize("name", [None, "m", "/models/m", MODEL.fingerprint])
def test_a_prompt_may_name_the_served_model(context: JobContext, name: str | None) -> None:
    arguments = {} if name is None else {"model": name}
    assert run_task(context, "jobs.complete", "a", **arguments)["model"] == "m"


def test_a_prompt_for_another_model_is_refused_with_the_served_name(context: JobContext) -> None:
    with pytest.raises(ModelNotServed, match=r"'gpt-4'.* serves 'm'"):
        run_task(context, "jobs.complete", "a", model="gpt-4")


def test_a_worker_with_another_model_computes_no_row_of_a_run(
    runs: Runs, serving_other: MakeContext, source: Path
) -> None:
    runs.plan(source, rows_per_shard=3)
    first, second = runs.jobs
    runs.run(first)
    with pytest.raises(
        RunOfAnotherModel, match=r"of model m \(float32, .*not of other \(bfloat16, "
    ):
        run_task(serving_other(), second.func_name, *second.args)
    assert [path.name for path in runs.output.glob("part-*")] == ["part-00000.parquet"]
    # Of a part that is there no row is computed: any worker may count it, or end the run with it.
    assert not run_task(serving_other(), first.func_name, *first.args)["run_finished"]
    assert runs.run(second)["run_finished"]


def test_shards_wait_for_the_plans_model_whichever_worker_resumes_the_run(
    runs: Runs, redis: Redis, serving_other: MakeContext, source: Path
) -> None:
    runs.plan(source, rows_per_shard=3)
    jobs = runs.jobs
    assert [redis.hget(job.key, MODEL_FIELD) for job in jobs] == [MODEL.fingerprint.encode()] * 2
    jobs[0].delete()
    planned = score_parquet(serving_other(), str(source), str(runs.output), rows_per_shard=3)
    assert planned["shards_enqueued"] == 1
    assert {redis.hget(job.key, MODEL_FIELD) for job in runs.jobs} == {MODEL.fingerprint.encode()}


def test_parts_and_manifest_say_what_answered(runs: Runs, source: Path) -> None:
    runs.plan(source)
    runs.work()
    manifest = runs.manifest
    metadata = pq.read_metadata(runs.output / "part-00000.parquet").metadata
    for said in (manifest, json.loads(metadata[b"tokenmill"])):
        assert (said["model"], said["fingerprint"]) == ("m", MODEL.fingerprint)
        assert (said["dtype"], said["attention_backend"]) == ("float32", "none")
        assert said["version"]
        assert said["commit"] == commit()
    plan = json.loads((runs.output / "_plan.json").read_text())
    pinned = {"name": "m", "fingerprint": MODEL.fingerprint, "dtype": "float32"}
    assert plan["model"] == {**pinned, "max_model_len": MODEL.max_model_len, "clock": ""}


def test_only_the_named_model_plans_a_new_run(
    runs: Runs, serving_other: MakeContext, source: Path
) -> None:
    with pytest.raises(ModelNotServed, match="'other'"):
        runs.plan(source, model="other")
    assert not runs.output.exists()
    score_parquet(serving_other(), str(source), str(runs.output), model="other")
    with pytest.raises(RunOfAnotherModel, match=r"of model other \(.*not of 'm'"):
        runs.plan(source, model="m")
    # Any worker may resume it under its own name.
    runs.plan(source, model="other")


def test_status_names_the_model_that_a_run_awaits(
    redis: Redis, runs: Runs, invoke: Invoke, serving_other: MakeContext, source: Path
) -> None:
    def start_worker(name: str, model: ServedModel) -> None:
        add_worker(redis, name)
        redis.set(worker_key(name), json.dumps({"models": model.names}))

    start_worker("w", MODEL)
    run = invoke("submit", source, runs.output, "--model", "other").output.splitlines()[0]
    (plan_job,) = runs.jobs
    assert redis.hget(plan_job.key, MODEL_FIELD) == b"other"
    assert "no worker on queue 'bulk' serves model other: start one" in invoke("status", run).output
    plan_job.delete()
    score_parquet(serving_other(), **plan_job.kwargs)
    assert "serves model other (bfloat16, " in invoke("status", run).output
    start_worker("x", OTHER)
    assert "serves model" not in invoke("status", run).output
    redis.expire(
        worker_key("x"), WORKER_STATS_TTL_S - 2 * SILENT_S
    )  # killed: RQ's key of it lives on
    assert "serves model other (bfloat16, " in invoke("status", run).output


def test_a_worker_that_serves_the_model_with_another_length_is_named(
    redis: Redis, runs: Runs, source: Path
) -> None:
    pinned = replace(OTHER, max_model_len=512)
    for name, queue in (("w4", "bulk"), ("w5", "prompts")):
        add_worker(redis, name)
        redis.hset(f"rq:worker:{name}", "queues", queue)
        served = replace(OTHER, max_model_len=256)
        record = {"models": served.names, "max_model_len": served.max_model_len}
        redis.set(worker_key(name), json.dumps(record))
    workers = read_workers(redis)
    assert other_length_text(workers, "bulk", pinned.pin) == "w4 serves it with up to 256 tokens"
    assert other_length_text(workers, "bulk", MODEL.pin) == ""
    assert other_length_text(workers, "bulk", "another/512") == ""

    run = submit_run(redis, "bulk", input=str(source), output=str(runs.output), model="other")
    (plan_job,) = runs.jobs
    plan_job.delete()
    redis.hset(run_key(run), mapping={"model": pinned.pin, "model_text": str(pinned)})
    awaited = read_snapshot(redis, run).awaited_model
    assert awaited == f"{pinned}, but w4 serves it with up to 256 tokens"


def test_a_planning_for_another_model_is_replaced_as_long_as_it_waits(
    redis: Redis, runs: Runs, invoke: Invoke, source: Path
) -> None:
    submission = ["submit", source, runs.output, "--model"]
    run = submit_run(redis, "bulk", input=str(source), output=str(runs.output), model="mispelt")
    assert read_snapshot(redis, run).awaited_model == "mispelt"
    (job,) = runs.jobs
    redis.zadd(f"rq:executions:{job.id}", {"e": 1})  # a worker holds it
    refused = invoke(*submission, "other")
    assert refused.exit_code == 1
    assert (
        f"is being planned already, for model 'mispelt': wait for that, or `tokenmill cancel {run}`"
        in (refused.output)
    )
    redis.delete(f"rq:executions:{job.id}")
    assert invoke(*submission, "other").exit_code == 0
    assert len(runs.jobs) == 1
    assert read_snapshot(redis, run).awaited_model == "other"
