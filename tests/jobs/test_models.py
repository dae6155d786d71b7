"""A run is one model's, and a job may name the model it wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli import commands as cli
from jobs.common.keys import MODEL_FIELD, SILENT_S, WORKER_STATS_TTL_S, worker_key
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import InvalidJob, ModelNotServed, PlanDamaged, RunOfAnotherModel
from jobs.runs.control import submit_run
from jobs.runs.plans.plan import Plan
from jobs.runs.watching.follow import End, follow
from jobs.runs.watching.snapshot import read_snapshot
from tests.jobs.answering import MODEL, queued_jobs, run_task, score_parquet, work_off

MakeContext = Callable[[], JobContext]
OTHER = ServedModel("other", "fingerprint of other", "bfloat16", "none")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [*"abcdef"]}), path)
    return path


@pytest.fixture
def serving_other(make_context: MakeContext) -> MakeContext:
    return lambda: replace(make_context(), model=OTHER)


@pytest.mark.parametrize("name", [None, "m", "/models/m", MODEL.fingerprint])
def test_a_prompt_may_name_the_served_model(context: JobContext, name: str | None) -> None:
    arguments = {} if name is None else {"model": name}
    assert run_task(context, "jobs.complete", "a", **arguments)["model"] == "m"
    messages = [{"role": "user", "content": "a"}]
    assert run_task(context, "jobs.chat", messages, **arguments)["model"] == "m"


def test_a_prompt_for_another_model_is_refused_with_the_served_name(context: JobContext) -> None:
    with pytest.raises(ModelNotServed, match=r"'gpt-4'.* serves 'm'"):
        run_task(context, "jobs.complete", "a", model="gpt-4")
    with pytest.raises(ModelNotServed, match=r"'gpt-4'.* serves 'm'"):
        run_task(context, "jobs.chat", [{"role": "user", "content": "a"}], model="gpt-4")


@pytest.mark.parametrize("name", ["", 3, ["m"], "m\nx", "x" * 5000])
def test_what_can_be_no_models_name_is_refused(context: JobContext, name: object) -> None:
    with pytest.raises(InvalidJob, match="expected the name of the served model"):
        run_task(context, "jobs.complete", "a", model=name)


def test_a_worker_with_another_model_computes_no_row_of_a_run(
    redis: Redis, make_context: MakeContext, serving_other: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=3)
    first, second = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    with pytest.raises(RunOfAnotherModel, match=r"of model m \(float32, .*not of other \(bfloat16, "):
        run_task(serving_other(), second.func_name, *second.args)
    assert [path.name for path in (tmp_path / "out").glob("part-*")] == ["part-00000.parquet"]
    # Of a part that is there no row is computed: any worker may count it, or end the run with it.
    assert not run_task(serving_other(), first.func_name, *first.args)["run_finished"]
    assert run_task(make_context(), second.func_name, *second.args)["run_finished"]


def test_shards_wait_for_the_plans_model_whichever_worker_resumes_the_run(
    redis: Redis, make_context: MakeContext, serving_other: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=3)
    jobs = queued_jobs(redis)
    assert [redis.hget(job.key, MODEL_FIELD) for job in jobs] == [MODEL.fingerprint.encode()] * 2
    jobs[0].delete()
    planned = score_parquet(serving_other(), str(source), str(tmp_path / "out"), rows_per_shard=3)
    assert planned["shards_enqueued"] == 1
    assert {redis.hget(job.key, MODEL_FIELD) for job in queued_jobs(redis)} == {MODEL.fingerprint.encode()}


def test_parts_and_manifest_say_what_answered(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    work_off(redis, make_context)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    metadata = pq.read_metadata(tmp_path / "out" / "part-00000.parquet").metadata
    for said in (manifest, json.loads(metadata[b"tokenmill"])):
        assert (said["model"], said["fingerprint"]) == ("m", MODEL.fingerprint)
        assert (said["dtype"], said["attention_backend"]) == ("float32", "none")
        assert said["version"]
    plan = json.loads((tmp_path / "out" / "_plan.json").read_text())
    assert plan["model"] == {"name": "m", "fingerprint": MODEL.fingerprint, "dtype": "float32"}


def test_only_the_named_model_plans_a_new_run(
    make_context: MakeContext, serving_other: MakeContext, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotServed, match="'other'"):
        score_parquet(make_context(), str(source), str(tmp_path / "out"), model="other")
    assert not (tmp_path / "out").exists()
    score_parquet(serving_other(), str(source), str(tmp_path / "out"), model="other")
    with pytest.raises(RunOfAnotherModel, match=r"of model other \(.*not of 'm'"):
        score_parquet(make_context(), str(source), str(tmp_path / "out"), model="m")
    # Any worker may resume it under its own name.
    score_parquet(make_context(), str(source), str(tmp_path / "out"), model="other")


def test_status_names_the_model_that_a_run_awaits(
    redis: Redis, redis_url: str, serving_other: MakeContext, source: Path, tmp_path: Path
) -> None:
    def invoke(*arguments: object) -> str:
        result = click.testing.CliRunner().invoke(cli.main, ["--url", redis_url, *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output

    def start_worker(name: str, model: ServedModel) -> None:
        redis.sadd("rq:workers:bulk", f"rq:worker:{name}")
        redis.hset(f"rq:worker:{name}", "state", "idle")
        redis.set(worker_key(name), json.dumps({"models": model.names}))

    start_worker("w", MODEL)
    run = invoke("submit", source, tmp_path / "out", "--model", "other").splitlines()[0]
    (plan_job,) = queued_jobs(redis)
    assert redis.hget(plan_job.key, MODEL_FIELD) == b"other"
    assert "serves model other; none of the 1 there does" in invoke("status", run)
    plan_job.delete()
    score_parquet(serving_other(), **plan_job.kwargs)
    assert "serves model other (bfloat16, " in invoke("status", run)
    start_worker("x", OTHER)
    assert "awaits" not in invoke("status", run)
    redis.expire(worker_key("x"), WORKER_STATS_TTL_S - 2 * SILENT_S)  # killed: RQ's key of it lives on
    assert "serves model other (bfloat16, " in invoke("status", run)


def test_a_plan_of_an_earlier_version_is_refused_by_name(
    make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    path = tmp_path / "out" / "_plan.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": 1, "model": "m"}))
    with pytest.raises(PlanDamaged, match="format 1, of another version"):
        score_parquet(make_context(), str(source), str(tmp_path / "out"))
    with pytest.raises(ValueError, match="not named by three texts"):
        Plan.from_text(json.dumps({**content, "model": {"name": 1, "fingerprint": 2, "dtype": 3}}))


def test_a_waiting_planning_for_another_model_is_not_taken_for_this_submission(
    redis: Redis, redis_url: str, source: Path, tmp_path: Path
) -> None:
    def invoke(*arguments: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli.main, ["--url", redis_url, *arguments])

    submission = ["submit", str(source), str(tmp_path / "out"), "--model"]
    run = submit_run(redis, "bulk", input=str(source), output=str(tmp_path / "out"), model="mispelt")
    refused = invoke(*submission, "other")
    assert refused.exit_code == 1
    assert f"is being planned already, for model 'mispelt': wait for that, or `tokenmill cancel {run}`" in (
        refused.output
    )
    assert read_snapshot(redis, run).awaited_model == "mispelt"
    assert invoke("cancel", run).exit_code == 0
    assert invoke(*submission, "other").exit_code == 0
    assert read_snapshot(redis, run).awaited_model == "other"


def test_following_says_which_model_is_awaited(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    redis.sadd("rq:workers:bulk", "rq:worker:w")
    redis.hset("rq:worker:w", "state", "idle")
    redis.set(worker_key("w"), json.dumps({"models": OTHER.names}))
    warnings: list[str] = []

    class Shown:
        show = staticmethod(lambda snapshot, tokens_per_s: None)
        warn = staticmethod(warnings.append)

    def work(seconds: float) -> None:
        work_off(redis, make_context)

    assert follow(lambda: read_snapshot(redis, run), Shown(), lambda: 0.0, work).end is End.FINISHED
    assert len(warnings) == 1
    assert "no worker on queue 'bulk' serves model m (float32, " in warnings[0]


def test_a_worker_of_rq_itself_may_serve_any_model(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    redis.sadd("rq:workers:bulk", "rq:worker:stock")
    redis.hset("rq:worker:stock", "state", "idle")
    assert read_snapshot(redis, run).awaited_model is None
