"""Each command of the docs on each format of input, from the first look at a file to the last at its run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from redis import Redis
from rq.job import JobStatus
from rq.results import Result as JobResult

from jobs.cli import folder_commands, status_text, trial_commands
from jobs.context import JobContext
from jobs.context.served_model import PromptMeter
from jobs.table import own_function
from tests.jobs.answering import add_worker, queued_jobs, run_task
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs

ROWS = [{"prompt": f"p{number}", "id": number} for number in range(6)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def csv_text(delimiter: str) -> str:
    return "".join(
        f"{name}{delimiter}{number}\n"
        for name, number in [("prompt", "id"), *map(dict.values, ROWS)]
    )


#: A file's name, what writes it, and the options that say how it is written.
INPUTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "in.parquet": (lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path), ()),
    "in.csv": (lambda path: path.write_text(csv_text(",")), ()),
    "in.tsv": (lambda path: path.write_text(csv_text("\t")), ()),
    "semicolons.csv": (
        lambda path: path.write_text(csv_text(";")),
        ("--delimiter", ";", "--decimal", ","),
    ),
    "wide.csv": (lambda path: path.write_text(csv_text(","), "utf-16"), ("--encoding", "utf-16")),
    "in.jsonl": (lambda path: path.write_text(LINES), ()),
    "in.txt": (lambda path: path.write_text(LINES), ("--input-format", "jsonl")),
    "in.arrow": (lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path), ()),
}


@pytest.fixture
def context(make_context: MakeContext) -> MakeContext:
    """Contexts of workers that can count tokens."""
    meter = PromptMeter(
        lambda request: [ord(each) for each in request.prompt or str(request.messages)], 64, 16
    )
    return lambda: replace(make_context(), meter=lambda: meter)


@pytest.fixture(autouse=True)
def _served(redis: Redis, context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does what is queued whenever a command waits."""
    add_worker(redis, "w")
    for waiting in (trial_commands, status_text, folder_commands):
        monkeypatch.setattr(waiting.time, "sleep", lambda seconds: work(redis, context))


def work(redis: Redis, make_context: Callable[[], JobContext]) -> None:
    for job in queued_jobs(redis):
        found = replace(make_context(), job_id=job.id)
        function = own_function(job.func_name)
        if function is not None:
            value = function(found, *job.args, **job.kwargs)
        else:
            value = run_task(found, job.func_name, *job.args, **job.kwargs)
        redis.lrem("rq:queue:bulk", 1, job.id)
        job.set_status(JobStatus.FINISHED)
        JobResult.create(job, JobResult.Type.SUCCESSFUL, ttl=60, return_value=value)


@pytest.mark.parametrize("name", INPUTS)
def test_every_command_works_on_every_format(
    invoke: Invoke, runs: Runs, tmp_path: Path, name: str
) -> None:
    write, dialect = INPUTS[name]
    source, output = tmp_path / name, tmp_path / "out"
    write(source)
    asked = (*dialect, "--template", "{prompt} {id}", "--temperature", 0)

    def says(*command: object) -> str:
        result: Result = invoke(*command)
        assert result.exit_code == 0, (command, result.output, result.exception)
        return result.stdout

    assert "prompt: p0 0" in says("preview", source, "--rows", 2, *asked)
    assert "answer" not in says("preview", source, "--no-answers", *asked)
    assert "rows     6, of which 0 would fail" in says(
        "submit", source, output, "--dry-run", *asked
    )
    assert not output.exists()
    assert "finished" in says("submit", source, output, "--wait", "--rows-per-shard", 2, *asked)
    assert "finished" in says(
        "submit", source, output, "--wait", "--rows-per-shard", 2, *asked
    )  # it stays as it is
    assert "6 of 6" in says("status", output)
    assert "6/6" in says("runs", "--state", "finished")
    assert "P5 5" in says("tail", output, "-n", 1, "--prompts")
    assert "no row has an error" in says("errors", output)
    assert "6 of 6 rows checked" in says("verify", output, "--sample", "100%")
    assert "_report.html" in says("report", output)
    reused = ("--reuse", output, "--wait", "--single-file", "--output-format", "csv")
    assert "6 rows of earlier runs" in says("submit", source, tmp_path / "again", *reused, *asked)
    assert says("errors", output, "--retry", tmp_path / "mended", "--wait") == ""
    assert not (tmp_path / "mended").exists(), "there is nothing to ask again"
    says("submit", source, tmp_path / "third", "--order", "prefix", *asked)
    says("cancel", tmp_path / "third")


def test_a_preview_shows_what_a_chat_has_beside_its_texts(invoke: Invoke, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"days": 24}}}
    tool = {"type": "function", "function": {"name": "weather"}}
    chat = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    (tmp_path / "in.jsonl").write_text(json.dumps({"chat": chat, "tools": [tool]}) + "\n")
    options = ("--messages-column", "chat", "--column", "tools=tools", "--no-answers")
    result = invoke("preview", tmp_path / "in.jsonl", *options)
    assert result.exit_code == 0, result.output
    assert f"  tools: {json.dumps([tool])}" in result.stdout
    assert "  user: Rome?" in result.stdout
    (shown,) = [line for line in result.stdout.splitlines() if line.startswith("    tool_calls: ")]
    assert json.loads(shown.partition(": ")[2])[0]["function"]["name"] == "weather"


@pytest.mark.parametrize("command", ["preview", "submit", "dry run"])
def test_every_look_at_a_file_names_its_encoding(
    invoke: Invoke, tmp_path: Path, command: str
) -> None:
    source = tmp_path / "in.csv"
    source.write_text("prompt\nMüller\n", "cp1252")
    commands = {
        "preview": ["preview", source],
        "submit": ["submit", source, tmp_path / "out", "--wait"],
        "dry run": ["submit", source, tmp_path / "out", "--dry-run"],
    }
    result = invoke(*commands[command])
    assert result.exit_code == 1
    assert "looks like cp1252" in str(result.output) + str(result.exception)
