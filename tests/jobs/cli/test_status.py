"""What `tokenmill status` and `submit` tell of a run that is under way, over, refused or held up."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as ClickResult
from redis import Redis
from rq.job import JobStatus
from rq.results import Result

from jobs.cli import main, status_text
from jobs.common.keys import SILENT_S, SUBMISSION_FIELD, WORKER_STATS_TTL_S, run_key, worker_key
from jobs.runs.watching.reading import read_snapshot
from tests.jobs.answering import add_worker, fail, queued_jobs, score_parquet
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs


def test_status_counts_what_is_done_started_queued_and_failed(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    run = runs.plan(source, rows_per_shard=1)["run"]
    done, started, failed, *_ = runs.jobs
    runs.run(done)
    redis.lrem("rq:queue:bulk", 1, started.id)
    redis.hset(
        started.key,
        mapping={"status": "started", "tokenmill_progress": '{"rows_done": 1, "tokens": 9}'},
    )
    redis.zadd("rq:wip:bulk", {f"{started.id}:abc": 9e12, "other:x": 9e12})
    fail(redis, failed, "jobs.errors.InputChanged: it changed")
    result = invoke("status", run)
    assert result.exit_code == 0
    assert f"run {run}: running" in result.stdout
    assert "rows     2 of 5, 0 with an error" in result.stdout
    assert "shards   1 of 5 done, 1 started, 2 queued, 1 failed" in result.stdout
    assert "tokens   10 generated" in result.stdout
    assert f"{failed.id}: jobs.errors.InputChanged: it changed" in result.stderr


def test_status_of_a_folder_tells_what_the_folder_says_while_redis_does_not_answer(
    runs: Runs, source: Path
) -> None:
    def status(*arguments: str) -> ClickResult:
        url = "redis://127.0.0.1:1/0"  # nothing listens there
        return CliRunner().invoke(main, ["--url", url, "status", *arguments])

    run = runs.plan(source, rows_per_shard=2)["run"]
    first, *rest = runs.jobs
    runs.run(first)
    shown = status(str(runs.output))
    assert shown.exit_code == 1
    assert "does not answer" in shown.stderr
    assert shown.stdout.splitlines() == [
        f"run {run}: not finished",
        f"output   {runs.output}",
        "rows     5",
        "shards   1 of 3 done",
    ]
    for job in rest:
        runs.run(job)
    assert f"run {run}: finished" in status(str(runs.output)).stdout
    for arguments in ((run,), (str(runs.output), "--json"), (str(runs.output.parent),), ()):
        shown = status(*arguments)
        assert (shown.exit_code, shown.stdout) == (1, "")
    (runs.output / "_plan.json").write_text("{")
    assert "does not answer" in status(str(runs.output)).stderr


def test_status_of_a_folder_needs_no_key_in_redis(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    run = runs.plan(source, rows_per_shard=2)["run"]
    assert f"run {run}: running" in invoke("status", runs.output).stdout
    first, *rest = runs.jobs
    runs.run(first)
    redis.delete(run_key(run), run_key(run, "parts"))
    text = invoke("status", runs.output).stdout
    assert "shards   1 of 3 done" in text
    assert "submit it again" in text
    for job in rest:
        runs.run(job)
    redis.flushall()
    text = invoke("status", runs.output).stdout
    assert f"run {run}: finished" in text
    assert "rows     5, 1 with an error" in text
    (runs.output / "_plan.json").write_text("{")
    assert "PlanDamaged" in invoke("status", runs.output).output


def test_what_others_wrote_steers_no_terminal(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    (job,) = queued_jobs(redis)
    fail(redis, job, "ValueError: \x1b[2J\x1b]0;title\x07" + "x" * 5000)
    shown = invoke("status", run)
    assert r"planning failed: ValueError: \x1b[2J\x1b]0;title\x07xxx" in shown.stdout
    assert "ValueError" not in shown.stderr, "one line is enough"
    refused = invoke("status", "no\x1b[2Jsuch\nrun")
    assert refused.exit_code == 1
    for line in (shown.output + refused.output).split("\n"):
        assert line.isprintable()
        assert len(line) < 3000


def test_status_does_not_call_a_run_finished_whose_part_is_gone(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    output = runs.output
    run = runs.plan(source, output, rows_per_shard=2)["run"]
    runs.work()
    assert f"run {run}: finished" in invoke("status", run).stdout
    (output / "part-00001.parquet").unlink()
    for name in (run, output, output):
        text = invoke("status", name).stdout
        assert f"run {run}: incomplete" in text
        assert (
            f"1 part is gone: to compute what is missing, submit into another folder with --reuse {output}"
            in text
        )
        if name == output:
            redis.flushall()


def test_what_an_earlier_cancel_stopped_is_no_failure_of_the_run_that_is_resumed(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    submit = ("submit", source, runs.output, "--rows-per-shard", 2)
    run = str(invoke(*submit).stdout.strip())
    runs.work()
    stopped, failed, _ = runs.jobs
    for job in (stopped, failed):  # as a worker ends them
        job.set_status(JobStatus.STOPPED)
        redis.zadd("rq:failed:bulk", {job.id: 1e12})
        redis.lrem("rq:queue:bulk", 1, job.id)
    invoke("cancel", run)
    invoke(*submit)
    redis.hset(f"rq:job:{failed.id}", SUBMISSION_FIELD, 10**15)  # it has failed since
    snapshot = read_snapshot(redis, run)
    assert snapshot.failed_jobs == (failed.id,)
    told = invoke("status", run).output
    assert failed.id in told
    assert stopped.id not in told


def test_a_folder_names_its_run_before_it_is_planned_and_however_it_is_written(
    invoke: Invoke, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    monkeypatch.chdir(tmp_path)
    for name in ("out", "out/", "./out", f"{tmp_path}/out/"):
        assert f"run {run}: planning" in invoke("status", name).stdout
    assert "1 job removed" in invoke("cancel", "out/").stdout


@pytest.mark.parametrize("options", [(), ("--wait",)])
def test_submit_waits_for_the_verdict_of_a_planning_that_is_soon_there(
    invoke: Invoke,
    redis: Redis,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str],
) -> None:
    add_worker(redis, "w")

    def planning_fails(seconds: float) -> None:
        fail(
            redis,
            queued_jobs(redis)[0],
            "jobs.errors.MissingColumn: no column 'prompt'\ntokenmill: client",
        )

    monkeypatch.setattr(status_text.time, "sleep", planning_fails)
    result = invoke("submit", source, tmp_path / "out", *options)
    assert result.exit_code == 1
    assert result.output.count("jobs.errors.MissingColumn: no column 'prompt'") == 1
    assert "planning failed" in result.stderr
    assert options or result.stdout == ""


def plan_as_a_worker(redis: Redis, make_context: MakeContext) -> None:
    """Carry out the planning that waits, and leave its result."""
    (job,) = queued_jobs(redis)
    redis.lrem("rq:queue:bulk", 1, job.id)
    context = replace(make_context(), job_id=job.id)
    value = score_parquet(context, *job.args, **job.kwargs)
    job.set_status(JobStatus.FINISHED)
    Result.create(job, Result.Type.SUCCESSFUL, ttl=600, return_value=value)


def test_submitting_a_finished_run_says_that_it_is_already_finished(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.plan(source)
    runs.work()
    add_worker(redis, "w")
    monkeypatch.setattr(
        status_text.time, "sleep", lambda seconds: plan_as_a_worker(redis, runs.context)
    )
    result = invoke("submit", source, runs.output)
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


def test_status_says_how_many_other_jobs_wait_and_run_and_of_which_run(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    add_worker(redis, "w")
    first = runs.plan(source, tmp_path / "first", rows_per_shard=1)["run"]
    runs.plan(source, tmp_path / "second")
    says = (
        f"waits    other jobs on queue 'bulk': 5 waiting, 0 running, some of run {first}; each run"
    )
    assert says in invoke("status", tmp_path / "second").stdout
    started = runs.jobs[0]
    redis.lrem("rq:queue:bulk", 1, started.id)
    redis.zadd("rq:wip:bulk", {f"{started.id}:e": 9e12})
    text = invoke("status", tmp_path / "second").stdout
    assert "'bulk': 4 waiting, 1 running" in text
    redis.lpush("rq:queue:bulk", redis.rpop("rq:queue:bulk"))
    moved = invoke("status", tmp_path / "second").stdout
    assert "'bulk': 4 waiting, 1 running" in moved, "the place in the queue does not matter"
    assert "other jobs" not in invoke("status", tmp_path / "first").stdout


def test_status_names_the_silent_worker_that_holds_shards_and_says_when_others_take_them_over(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    runs.plan(source, rows_per_shard=1)
    add_worker(redis, "w")
    for name, job in zip(("dead", "alive"), runs.jobs, strict=False):
        redis.lrem("rq:queue:bulk", 1, job.id)
        redis.zadd("rq:wip:bulk", {f"{job.id}:e": 9e12})
        redis.hset(job.key, "worker_name", name)
    for name, silent_s in (("alive", 0), ("dead", 400)):
        add_worker(redis, name)
        redis.set(f"tokenmill:worker:{name}", '{"state": "busy"}', ex=WORKER_STATS_TTL_S - silent_s)
    text = invoke("status", runs.output).stdout
    assert (
        "worker 'dead', which holds some of the run's shards, has been silent for more than" in text
    )
    assert "'alive'" not in text


def test_status_says_why_no_worker_claims(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path
) -> None:
    runs.plan(source, rows_per_shard=1)
    add_worker(redis, "w")
    reasons = {
        "restored": "waits    no worker claims anything: Redis came back with older data",
        "suspended": "waits    all workers are suspended and claim nothing: `rq resume` lets them go on",
    }
    for state in ("idle", *reasons):
        redis.set("tokenmill:worker:w", f'{{"state": "{state}"}}', ex=WORKER_STATS_TTL_S)
        text = invoke("status", runs.output).stdout
        given = [name for name, reason in reasons.items() if reason in text]
        assert given == ([] if state == "idle" else [state])


def test_a_run_whose_only_worker_is_dead_needs_a_worker(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    runs.plan(source)
    add_worker(redis, "dead")
    redis.set(worker_key("dead"), '{"state": "busy"}', ex=WORKER_STATS_TTL_S - 2 * SILENT_S)
    shown = invoke("status", tmp_path / "out").stdout
    assert "no worker listens on queue 'bulk': start one with" in shown
    assert "it is behind" not in shown
