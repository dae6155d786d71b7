import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click.testing
import pytest
from redis import Redis

from jobs import cli
from jobs.cli import status_text
from jobs.common.release import commit
from tests.jobs.answering import fail, queued_jobs
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs


def test_submit_prints_the_run_and_enqueues_only_its_planning(
    runs: Runs, invoke: Invoke, source: Path
) -> None:
    result = invoke(
        "submit", source, runs.output, "--max-tokens", 5, "--temperature", 0, "--stop", "x"
    )
    assert result.exit_code == 0, result.output
    run = result.stdout.strip()
    (job,) = runs.jobs
    assert (job.id, job.func_name) == (f"{run}-plan", "jobs.score_parquet")
    assert job.kwargs["sampling"] == {"max_tokens": 5, "temperature": 0.0, "stop": ["x"]}
    assert job.kwargs["queue"] == "bulk"
    assert runs.work()[0]["run"] == run
    assert len(runs.jobs) == 1


ASKED, LAST = (
    {"name": "a", "template": "{prompt}", "sampling": {"stop": "."}},
    {"name": "b", "template": "{a}"},
)
SAMPLING_OPTIONS = [
    *("--sampling", '{"presence_penalty": 2, "min_tokens": 1}', "--presence-penalty", 0.5),
    *("--frequency-penalty", -1, "--repetition-penalty", 1.2, "--logit-bias", '{"5": 2.5}'),
    *("--allowed-token-ids", "[5, 6]", "--bad-words", "no, never", "--bad-words", "maybe"),
    *("--structured-outputs", '{"json": {"b": 1, "a": 2}}', "--truncate-prompt-tokens", -1),
    *(
        "--include-stop-str-in-output",
        "--no-skip-special-tokens",
        "--logprobs",
        5,
        "--prompt-logprobs",
        0,
    ),
]
SAMPLING = {
    "presence_penalty": 0.5, "min_tokens": 1, "frequency_penalty": -1.0, "repetition_penalty": 1.2,
    "logit_bias": {"5": 2.5}, "allowed_token_ids": [5, 6], "bad_words": ["no, never", "maybe"],
    "structured_outputs": {"json": {"b": 1, "a": 2}}, "truncate_prompt_tokens": -1,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 5, "prompt_logprobs": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            SAMPLING_OPTIONS,
            {"sampling": SAMPLING},
        ),  # an option goes before the same value of --sampling
        (["--keep", ""], {"keep": []}),
        (
            [
                "--keep",
                '"x,y",id',
                "--keep",
                "prompt",
                "--output-prefix",
                "o_",
                "--limit",
                2,
                "--n",
                2,
            ],
            {
                "keep": ["id", "prompt", "x,y"],
                "output_prefix": "o_",
                "limit": 2,
                "sampling": {"n": 2},
            },
        ),
        (["--template", "{t}", "--default", "t=not = known"], {"defaults": {"t": "not = known"}}),
        (["--single-file", "--output-format", "csv"], {"single_file": "csv"}),
        (
            ["--reuse", "/old", "--only-new", "--reused-column", "from"],
            {"reuse": ["/old"], "only_new": True, "reused_column": "from"},
        ),
        (
            ["--format", "openai-batch", "--model-alias", "gpt-4o", "--model-alias", "gpt-4"],
            {"input_format": "openai-batch", "model_alias": ["gpt-4o", "gpt-4"]},
        ),
        (
            ["--format", "openai-batch", "--inline-pictures"],
            {"input_format": "openai-batch", "inline_pictures": True},
        ),
        (
            ["--format", "openai-batch", "--batch-endpoint", "/v1/completions"],
            {"input_format": "openai-batch", "batch_endpoint": "/v1/completions"},
        ),
        (
            ["--logprobs", 5, "--logprob-type", "float16"],
            {"sampling": {"logprobs": 5}, "logprob_type": "float16"},
        ),
        (
            ["--prompt", "a={prompt} = In short:", "--prompt", "b={a}"],
            {
                "prompts": [
                    {"name": "a", "template": "{prompt} = In short:"},
                    {"name": "b", "template": "{a}"},
                ]
            },
        ),
        (["--prompts", json.dumps([ASKED])], {"prompts": [ASKED]}),
        (
            ["--template", "{prompt}", "--labels", "yes, no", "--calibrate"],
            {"labels": ["yes", "no"], "calibrate": True},
        ),
        (
            ["--prompts", json.dumps([ASKED, LAST]), "--labels", "yes,no"],
            {"prompts": [ASKED, LAST]},
        ),
        (
            ["--column", "max_tokens=a=b", "--column", "temperature=t"],
            {"sampling_columns": {"max_tokens": "a=b", "temperature": "t"}},
        ),
        (["--check-schema", "schema.json"], {"check": {"json": {"type": "object"}}}),
        (
            ["--check-regex", "a+", "--max-attempts", 5],
            {"check": {"regex": "a+"}, "max_attempts": 5},
        ),
        (
            ["--check-function", "m.f", "--check-columns", "t"],
            {"check": {"function": "m.f"}, "check_columns": ["t"]},
        ),
        (["--continue-on-length"], {"continue_on_length": True}),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_what_is_asked_reaches_the_planning(
    runs: Runs,
    invoke: Invoke,
    options: list[object],
    wanted: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs.source.parent)
    runs.write(["a"], t=[0], **{"a=b": [3], "x,y": [1]})
    Path("schema.json").write_text('{"type": "object"}')
    result = invoke("submit", runs.source, runs.output, *options)
    assert result.exit_code == 0, result.output
    (job,) = runs.jobs
    assert {name: job.kwargs[name] for name in wanted} == wanted


def test_relative_paths_start_at_the_callers_folder(
    runs: Runs, invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("submit", "in.parquet", "out").exit_code == 0
    (job,) = runs.jobs
    assert job.kwargs["input"] == [str(source)]
    assert job.kwargs["output"] == str(runs.output)


def test_submitting_twice_plans_once_and_again_after_the_end(
    invoke: Invoke, redis: Redis, source: Path, tmp_path: Path
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
        (["--template", "a", "--messages-template", "[]"], "give one"),
        (
            ["--template", "{a}", "--prompt-column", "prompt"],
            "--prompt-column and --template each say",
        ),
        (
            ["--template-file", "/no/such/file"],
            "--template-file /no/such/file cannot be read: No such file",
        ),
        (["--sampling", '{"max_tokns": 5}'], "did you mean max_tokens?"),
        (["--rows-per-shard", "0"], "from 1"),
        (["--prompt", "{text}"], "expected NAME=TEMPLATE"),
        (["--column", "max_tokens"], "NAME=COLUMN"),
        (["--column", "seed=x"], "MissingColumn"),
        (["--queue", "bulk\n"], "expected a queue's name"),
        (["--output-format", "csv"], "add --single-file"),
        (["--template", "{prompt}", "--default", "b="], "has a default"),
        (["--template", "{prompt}", "--default", "b"], "COLUMN=TEXT"),
        (["--model-alias", "gpt-4o"], "model_alias is for batch files"),
        (["--inline-pictures"], "inline_pictures is for batch files"),
        (["--batch-endpoint", "/v1/completions"], "batch_endpoint is for batch files"),
        (["--format", "openai-batch", "--batch-endpoint", "x"], "an endpoint such as"),
        (["--format", "openai-batch", "--max-tokens", "5"], "sampling and a batch file"),
    ],
)
def test_wrong_options_fail_before_anything_is_enqueued(
    runs: Runs, invoke: Invoke, source: Path, options: list[str], says: str
) -> None:
    result = invoke("submit", source, runs.output, *options)
    assert result.exit_code != 0
    assert says in result.output
    assert runs.jobs == []
    assert "Traceback" not in result.output


def test_a_template_may_come_from_a_file(
    runs: Runs, invoke: Invoke, source: Path, redis: Redis, tmp_path: Path
) -> None:
    template = tmp_path / "template.txt"
    for text in (
        "Is this good?\n\n{prompt}\n",
        "\ufeffIs this good?\n\n{prompt}\r\n",
    ):  # as editors save it
        template.write_bytes(text.encode())
        assert invoke("submit", source, runs.output, "--template-file", template).exit_code == 0
        (job,) = runs.jobs
        assert job.kwargs["template"] == "Is this good?\n\n{prompt}"
        redis.flushall()


def test_a_forgotten_output_folder_is_named_before_an_input_is_taken_for_it(
    runs: Runs, invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    result = invoke("submit", tmp_path / "more.parquet", source)
    assert result.exit_code == 2
    assert f"OUT is the file {source}" in result.output
    assert runs.jobs == []


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


@pytest.mark.parametrize("url", ["redis://:s3cret/x@localhost:6379", "http://:s3cret@localhost"])
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    result = click.testing.CliRunner().invoke(cli.main, ["--url", url, "status", "0" * 16])
    assert result.exit_code == 2
    assert "redis://" in result.output
    assert "s3cret" not in result.output


def test_wait_runs_to_success_and_logs_a_line_for_each_state(
    runs: Runs, invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit()  # it waits for git, and must not do so with the sleep below
    monkeypatch.setattr(status_text.time, "sleep", lambda seconds: runs.work())
    result = invoke("submit", source, runs.output, "--wait", "--rows-per-shard", 2)
    assert result.exit_code == 0, result.output
    assert "finished" in result.stdout
    planning, no_worker, running, finished = result.stderr.splitlines()
    assert planning == "planning"
    assert "no worker listens on queue 'bulk'" in no_worker
    assert running == "running: 0 of 5 rows"
    assert finished.startswith("finished: 5 of 5 rows, ")


def test_ctrl_c_leaves_the_run_going_and_says_how_to_follow_it(
    runs: Runs, invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status_text.time, "sleep", interrupt)
    result = invoke("submit", source, runs.output, "--wait")
    assert result.exit_code == 130
    assert "tokenmill status" in result.stderr
    assert len(runs.jobs) == 1


def test_the_version_is_told() -> None:
    result = click.testing.CliRunner().invoke(cli.main, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tokenmill, version {version('tokenmill')}"
