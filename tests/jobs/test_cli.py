from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from redis import exceptions as redis_errors
from rq import Queue
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer

from jobs.cli import commands as cli
from jobs.common.keys import SUBMISSION_FIELD, run_key, run_parts_key
from jobs.common.version import code_version
from jobs.context import JobContext
from jobs.errors import RunCancelled
from jobs.runs.follow import End, follow
from jobs.runs.names import shard_job_id
from jobs.runs.snapshot import RunSnapshot, read_snapshot
from jobs.runs.state import RunState
from tests.jobs.answering import queued_jobs, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke
from tests.jobs.test_progress import snapshot

MakeContext = Callable[[], JobContext]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [*"abcd", None]}), path)
    return path


def fail(redis: Redis, job: Job, text: str) -> None:
    """Leave a job as a worker leaves one that raised."""
    redis.lrem("rq:queue:bulk", 1, job.id)
    job.ended_at = job.enqueued_at
    job.save()
    job.set_status(JobStatus.FAILED)
    with redis.pipeline() as pipe:
        job._handle_failure(f"Traceback:\n  somewhere\n{text}", pipe)
        pipe.execute()


def test_submit_prints_the_run_and_enqueues_only_its_planning(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    result = invoke("submit", source, tmp_path / "out", "--max-tokens", 5, "--temperature", 0, "--stop", "x")
    assert result.exit_code == 0, result.output
    run = result.stdout.strip()
    (job,) = queued_jobs(redis)
    assert (job.id, job.func_name) == (f"{run}-plan", "jobs.score_parquet")
    assert job.kwargs["sampling"] == {"max_tokens": 5, "temperature": 0.0, "stop": ["x"]}
    assert job.kwargs["queue"] == "bulk"
    assert work_off(redis, make_context)[0]["run"] == run
    assert len(queued_jobs(redis)) == 1


def test_every_common_sampling_value_is_an_option(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    """It goes before the same value of --sampling, as JSON, and one that is not given is not there."""
    options = [
        *("--sampling", '{"presence_penalty": 2, "min_tokens": 1}', "--presence-penalty", 0.5),
        *("--frequency-penalty", -1, "--repetition-penalty", 1.2, "--logit-bias", '{"5": 2.5}'),
        *("--allowed-token-ids", "[5, 6]", "--bad-words", "no, never", "--bad-words", "maybe"),
        *("--structured-outputs", '{"json": {"b": 1, "a": 2}}'),
        *("--include-stop-str-in-output", "--no-skip-special-tokens", "--truncate-prompt-tokens", -1),
    ]
    result = invoke("submit", source, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    (job,) = queued_jobs(redis)
    assert job.kwargs["sampling"] == {
        "presence_penalty": 0.5, "min_tokens": 1, "frequency_penalty": -1.0, "repetition_penalty": 1.2,
        "logit_bias": {"5": 2.5}, "allowed_token_ids": [5, 6], "bad_words": ["no, never", "maybe"],
        "structured_outputs": {"json": {"b": 1, "a": 2}},
        "include_stop_str_in_output": True, "skip_special_tokens": False, "truncate_prompt_tokens": -1,
    }  # fmt: skip
    shown = invoke("submit", "--help").output
    assert all(
        f"--{name.replace('_', '-')} " in shown for name in job.kwargs["sampling"].keys() - {"min_tokens"}
    )


def test_relative_paths_start_at_the_callers_folder(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("submit", "in.parquet", "out").exit_code == 0
    (job,) = queued_jobs(redis)
    assert job.kwargs["input"] == [str(source)]
    assert job.kwargs["output"] == str(tmp_path / "out")


def test_submitting_twice_plans_once_and_again_after_the_end(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert invoke("submit", source, tmp_path / "out").exit_code == 0
    (job,) = queued_jobs(redis)
    fail(redis, job, "x")
    assert invoke("submit", source, tmp_path / "out").exit_code == 0
    assert len(queued_jobs(redis)) == 1
    assert redis.zcard("rq:failed:bulk") == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sampling", "{"], "not JSON"),
        (["--sampling", "[]"], "no dict"),
        (["--sampling", '{"n": 300}'], "n must be"),
        (["--messages-template", "{}"], "no list"),
        (["--template", "{a.b}"], "plain column name"),
        (["--template", "a", "--messages-template", "[]"], "give one"),
        (["--template", "a", "--messages-column", "b"], "give one"),
        (["--template", "{a}", "--prompt-column", "prompt"], "--prompt-column and --template each say"),
        (["--template", "Is it good?"], "names no column"),
        (["--messages-template", '[{"role": "user", "content": "hi"}]'], "names no column"),
        (["--template-file", "/no/such/file"], "--template-file /no/such/file cannot be read: No such file"),
        (["--temperature", "-1"], "temperature must be between 0 and 1000000, got -1"),
        (["--sampling", '{"max_tokns": 5}'], "did you mean max_tokens?"),
        (["--logit-bias", "[1]"], "no dict"),
        (["--logit-bias", '{"a": 1}'], "a key of logit_bias must be a token id"),
        (["--allowed-token-ids", "[]"], "allowed_token_ids is empty"),
        (["--structured-outputs", '{"pattern": "a"}'], "none of json, regex"),
        (["--repetition-penalty", "0"], "repetition_penalty must be between"),
        (["--rows-per-shard", "0"], "from 1"),
        (["--queue", ""], "queue is '', expected a queue's name"),
        (["--queue", "q" * 256], "expected a queue's name, printable and at most 255"),
        (["--queue", "bulk\n"], "expected a queue's name"),
    ],
)
def test_wrong_options_fail_before_anything_is_enqueued(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    result = invoke("submit", source, tmp_path / "out", *options)
    assert result.exit_code != 0
    assert says in result.output
    assert queued_jobs(redis) == []
    assert "Traceback" not in result.output


def test_a_template_may_come_from_a_file(invoke: Invoke, redis: Redis, source: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    for text in ("Is this good?\n\n{prompt}\n", "\ufeffIs this good?\n\n{prompt}\r\n"):  # as editors save it
        template.write_bytes(text.encode())
        assert invoke("submit", source, tmp_path / "out", "--template-file", template).exit_code == 0
        (job,) = queued_jobs(redis)
        assert job.kwargs["template"] == "Is this good?\n\n{prompt}"
        redis.flushall()


def test_a_working_directory_that_is_gone_is_one_line(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in (("submit", "in.parquet", "out"), ("status", "out")):
        result = invoke(*command)
        assert result.exit_code == 1
        assert "relative to a working directory that is gone: give an absolute path" in result.output


def test_columns_are_checked_as_the_planning_will_see_them(
    invoke: Invoke, redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    for word in ("1", "two"):  # text for the whole input, though the first alone would be a number
        (tmp_path / "in" / f"word={word}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [0]}), tmp_path / "in" / f"word={word}" / "x.parquet")
    result = invoke("submit", tmp_path / "in", tmp_path / "out", "--prompt-column", "word")
    assert result.exit_code == 0, result.output
    assert work_off(redis, make_context)[0]["rows"] == 2


def test_several_inputs_make_one_run(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["z"]}), tmp_path / "more.parquet")
    assert invoke("submit", source, tmp_path / "more.parquet", tmp_path / "out").exit_code == 0
    assert work_off(redis, make_context)[0]["rows"] == 6


def test_a_forgotten_output_folder_is_named_before_an_input_is_taken_for_it(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    result = invoke("submit", tmp_path / "more.parquet", source)
    assert result.exit_code == 2
    assert f"OUT is the file {source}" in result.output
    assert queued_jobs(redis) == []


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


def test_an_unknown_run_is_said_clearly(invoke: Invoke) -> None:
    for command in ("status", "cancel"):
        result = invoke(command, "0" * 16)
        assert result.exit_code == 1
        assert "knows no run" in result.output


def test_a_redis_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = click.testing.CliRunner().invoke(
        cli.main, ["--url", f"unix://{tmp_path}/none", "status", "0" * 16]
    )
    assert result.exit_code == 1
    assert "RQ_REDIS_URL" in result.output
    assert "Traceback" not in result.output


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


def test_a_planning_job_lost_between_a_queue_and_its_killed_worker_is_enqueued_again(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    invoke("submit", source, tmp_path / "out")
    redis.delete("rq:queue:bulk")
    invoke("submit", source, tmp_path / "out")
    assert len(queued_jobs(redis)) == 1


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


class WorkersClock:
    """A clock whose sleep lets one thing happen at a time, as workers would meanwhile."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self.now = 0.0
        self._events: Iterator[Callable[[], object]] = iter(events)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        next(self._events)()


class Shown:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.warnings: list[str] = []
        self.speeds: list[float] = []

    def show(self, snapshot: RunSnapshot, tokens_per_s: float) -> None:
        self.rows.append(snapshot.rows_done)
        self.speeds.append(tokens_per_s)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def add_worker(redis: Redis, name: str) -> None:
    redis.sadd("rq:workers:bulk", f"rq:worker:{name}")
    redis.hset(f"rq:worker:{name}", "state", "idle")


def test_following_shows_rows_and_speed_until_the_run_ends(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    add_worker(redis, "w")
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)["run"]
    shards = [
        lambda job=job: run_task(make_context(), job.func_name, *job.args) for job in queued_jobs(redis)
    ]
    clock, shown = WorkersClock(*shards), Shown()
    followed = follow(lambda: read_snapshot(redis, run), shown, clock, clock.sleep)
    assert followed.end is End.FINISHED
    assert followed.seconds == 1.5
    assert shown.rows == [0, 2, 4, 5]
    assert shown.speeds == [0.0, 4.0, 4.0, pytest.approx(4 / 1.5)]
    assert shown.warnings == []


def test_speed_counts_from_the_end_of_planning_and_is_never_negative(redis: Redis) -> None:
    looks = iter(
        [
            snapshot(tokens=9000, plan_status=JobStatus.STARTED),
            snapshot(tokens=0, plan_status=JobStatus.STARTED),
            snapshot(tokens=5000, plan_status=JobStatus.STARTED),
            snapshot(tokens=5010),
            snapshot(tokens=4000),
            snapshot(tokens=4010),
            snapshot(tokens=4020, finished=True),
        ]
    )
    clock, shown = WorkersClock(*[lambda: None] * 6), Shown()
    follow(lambda: next(looks), shown, clock, clock.sleep)
    assert shown.speeds == [0.0, 0.0, 0.0, 20.0, 0.0, 20.0, 20.0]


def test_following_ends_when_redis_was_flushed(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    clock = WorkersClock(redis.flushall)
    followed = follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep)
    assert followed.end is End.FORGOTTEN


def test_following_keeps_waiting_and_says_that_no_worker_listens(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    redis.sadd("rq:workers:bulk", "rq:worker:dead")  # killed: its key has expired
    events = [
        lambda: None,
        lambda: add_worker(redis, "w"),
        lambda: redis.delete("rq:worker:w"),
        lambda: work_off(redis, make_context),
    ]
    clock, shown = WorkersClock(*events), Shown()
    assert follow(lambda: read_snapshot(redis, run), shown, clock, clock.sleep).end is End.FINISHED
    assert ["no worker" in text for text in shown.warnings] == [True, False, True]
    assert "rq worker" in shown.warnings[0]


def test_following_ends_when_only_failed_shards_are_left(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=3)["run"]
    first, second = queued_jobs(redis)
    events = [
        lambda: fail(redis, first, "DiskFull"),
        lambda: run_task(make_context(), second.func_name, *second.args),
    ]
    clock = WorkersClock(*events)
    followed = follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep)
    assert followed.end is End.SHARDS_FAILED
    assert followed.snapshot.failed_jobs == (shard_job_id(run, 0),)


def test_following_ends_when_the_last_shard_died_before_the_end(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    work_off(redis, make_context)
    redis.hdel(run_key(run), "finished")
    clock = WorkersClock(lambda: None, lambda: None)
    followed = follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep)
    assert followed.end is End.STRANDED


def test_following_goes_on_while_shards_wait_inside_a_worker(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=3)["run"]
    jobs = queued_jobs(redis)

    def claim_all() -> None:  # taken from the queue, not begun: in no registry of RQ's
        redis.delete("rq:queue:bulk")
        for job in jobs:
            redis.zadd(f"rq:executions:{job.id}", {"e": 1})

    def finish_all() -> None:
        for job in jobs:
            run_task(make_context(), job.func_name, *job.args)
            redis.delete(f"rq:executions:{job.id}")

    clock = WorkersClock(claim_all, lambda: None, lambda: None, finish_all)
    assert follow(lambda: read_snapshot(redis, run), Shown(), clock, clock.sleep).end is End.FINISHED


def test_a_run_that_is_submitted_again_while_its_shards_run_is_shown_as_running() -> None:
    assert snapshot(plan_status=JobStatus.QUEUED).state == "running"
    assert snapshot(plan_status=JobStatus.QUEUED, started=0).state == "planning"


def test_following_ends_when_someone_emptied_the_queue(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path, invoke: Invoke
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    planned = invoke("submit", source, tmp_path / "other").stdout.strip()
    clock = WorkersClock(Queue("bulk", redis, serializer=JSONSerializer).empty, lambda: None, lambda: None)
    for name in (run, planned):
        followed = follow(lambda name=name: read_snapshot(redis, name), Shown(), clock, clock.sleep)
        assert followed.end is End.STRANDED


def test_following_outlives_an_outage_of_redis(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    add_worker(redis, "w")
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"))["run"]
    away = False

    def look() -> RunSnapshot:
        if away:
            raise redis_errors.ConnectionError("refused")
        return read_snapshot(redis, run)

    def goes() -> None:
        nonlocal away
        away = True

    def comes_back() -> None:
        nonlocal away
        away = False
        work_off(redis, make_context)

    clock, shown = WorkersClock(goes, lambda: None, comes_back), Shown()
    assert follow(look, shown, clock, clock.sleep).end is End.FINISHED
    assert ["no answer" in text for text in shown.warnings] == [True]


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


def test_a_folder_can_be_cancelled(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    assert "1 jobs removed" in invoke("cancel", tmp_path / "out").stdout
    assert queued_jobs(redis) == []


@pytest.mark.parametrize("url", ["redis://:s3cret/x@localhost:6379", "http://:s3cret@localhost"])
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    result = click.testing.CliRunner().invoke(cli.main, ["--url", url, "status", "0" * 16])
    assert result.exit_code == 2
    assert "redis://" in result.output
    assert "s3cret" not in result.output


def test_what_redis_refuses_is_one_line(invoke: Invoke, redis: Redis) -> None:
    redis.hset(run_key("0" * 16), mapping={"output": "/out", "queue": "bulk"})
    redis.set("rq:wip:bulk", "no sorted set")
    result = invoke("status", "0" * 16)
    assert result.exit_code == 1
    assert "Redis refused (ResponseError)" in result.output


def test_submitting_a_finished_run_again_finds_it_finished(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    score_parquet(make_context(), str(source), str(tmp_path / "out"))
    work_off(redis, make_context)
    run = invoke("submit", source, tmp_path / "out").stdout.strip()
    assert read_snapshot(redis, run).state == "planning"
    assert work_off(redis, make_context)[0]["shards_enqueued"] == 0
    assert queued_jobs(redis) == []
    snapshot = read_snapshot(redis, run)
    assert (snapshot.state, snapshot.rows_done) == ("finished", 5)


def test_a_failed_planning_is_told_with_exit_status_1(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planning_fails(seconds: float) -> None:
        fail(redis, queued_jobs(redis)[0], "jobs.errors.MissingColumn: no column 'prompt'")

    monkeypatch.setattr(cli.time, "sleep", planning_fails)
    result = invoke("submit", source, tmp_path / "out", "--wait")
    assert result.exit_code == 1
    assert "planning: jobs.errors.MissingColumn: no column 'prompt'" in result.stderr
    assert "planning failed" in result.stderr


def test_wait_runs_to_success_and_logs_a_line_for_each_state(
    invoke: Invoke,
    redis: Redis,
    make_context: MakeContext,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: work_off(redis, make_context))
    result = invoke("submit", source, tmp_path / "out", "--wait", "--rows-per-shard", 2)
    assert result.exit_code == 0, result.output
    assert "finished" in result.stdout
    planning, no_worker, running, finished = result.stderr.splitlines()
    assert planning == "planning"
    assert "no worker listens on queue 'bulk'" in no_worker
    assert running == "running: 0 of 5 rows, 0 tok/s"
    assert finished.startswith("finished: 5 of 5 rows, ")


def test_ctrl_c_leaves_the_run_going_and_says_how_to_follow_it(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", interrupt)
    result = invoke("submit", source, tmp_path / "out", "--wait")
    assert result.exit_code == 130
    assert "tokenmill status" in result.stderr
    assert len(queued_jobs(redis)) == 1


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


def test_another_package_named_jobs_is_refused(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = types.ModuleType("jobs")
    foreign.__file__ = "/elsewhere/jobs.py"
    monkeypatch.setitem(sys.modules, "jobs", foreign)
    result = invoke("status", "0" * 16)
    assert result.exit_code == 1
    assert "/elsewhere/jobs.py" in result.output


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


def test_the_version_is_told() -> None:
    result = click.testing.CliRunner().invoke(cli.main, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tokenmill, version {code_version()}"


def test_the_help_shows_each_commands_whole_summary(invoke: Invoke) -> None:
    commands = invoke("--help").stdout.partition("Commands:")[2]
    assert commands.count("\n  ") == len(cli.main.commands)
    assert "..." not in commands


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
