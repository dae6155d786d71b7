from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli import commands as cli
from jobs.cli import waiting
from jobs.common.version import code_version
from jobs.context import JobContext
from jobs.runs.watching.snapshot import read_snapshot
from tests.jobs.answering import fail, queued_jobs, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]


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
        (["--template", "{{ text }}"], "for Jinja's {{ column }} say so"),
        (["--template", "{% if a.b %}{{ a.b }}{% endif %}"], "--template-format jinja"),
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


def test_a_planning_job_lost_between_a_queue_and_its_killed_worker_is_enqueued_again(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
) -> None:
    invoke("submit", source, tmp_path / "out")
    redis.delete("rq:queue:bulk")
    invoke("submit", source, tmp_path / "out")
    assert len(queued_jobs(redis)) == 1


@pytest.mark.parametrize("url", ["redis://:s3cret/x@localhost:6379", "http://:s3cret@localhost"])
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    result = click.testing.CliRunner().invoke(cli.main, ["--url", url, "status", "0" * 16])
    assert result.exit_code == 2
    assert "redis://" in result.output
    assert "s3cret" not in result.output


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

    monkeypatch.setattr(waiting.time, "sleep", planning_fails)
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
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: work_off(redis, make_context))
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

    monkeypatch.setattr(waiting.time, "sleep", interrupt)
    result = invoke("submit", source, tmp_path / "out", "--wait")
    assert result.exit_code == 130
    assert "tokenmill status" in result.stderr
    assert len(queued_jobs(redis)) == 1


def test_another_package_named_jobs_is_refused(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = types.ModuleType("jobs")
    foreign.__file__ = "/elsewhere/jobs.py"
    monkeypatch.setitem(sys.modules, "jobs", foreign)
    result = invoke("status", "0" * 16)
    assert result.exit_code == 1
    assert "/elsewhere/jobs.py" in result.output


def test_the_version_is_told() -> None:
    result = click.testing.CliRunner().invoke(cli.main, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tokenmill, version {code_version()}"


def test_the_help_shows_each_commands_whole_summary(invoke: Invoke) -> None:
    commands = invoke("--help").stdout.partition("Commands:")[2]
    assert commands.count("\n  ") == len(cli.main.commands)
    assert "..." not in commands
