"""`tokenmill errors` and `tokenmill tail`: rows of a run as its folder has them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli import folder_commands
from tests.jobs.answering import run_task
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs
from tests.jobs.runs.test_verify import drawn

PROMPTS = [None, "broken 1", "secret"], ["broken 2", None, "broken\x1b[2J"]


@pytest.fixture
def planned(runs: Runs, tmp_path: Path) -> str:
    """A run of two files and four shards, of whose rows five fail."""
    (tmp_path / "in").mkdir()
    for number, prompts in enumerate(PROMPTS):
        pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in" / f"{number}.parquet")
    return str(runs.plan(str(tmp_path / "in"), str(runs.output), rows_per_shard=2)["run"])


def test_rows_that_failed_are_listed_by_reason_with_file_and_row(
    runs: Runs, invoke: Invoke, planned: str, tmp_path: Path
) -> None:
    assert "no row has an error" in invoke("errors", planned).stdout
    runs.work(answer=drawn)
    for name in (planned, runs.output):
        told = json.loads(invoke("errors", name, "--json").stdout)
        assert (told["run"], told["errors"]) == (planned, 5)
        assert told["reasons"] == [
            {"reason": "it is broken", "rows": 3, "examples": [1, 3, 5]},
            {"reason": "prompt is null", "rows": 2, "examples": [0, 4]},
        ]
        files = [(each["row"], Path(each["file"]).name, each["file_row"]) for each in told["rows"]]
        assert files == [
            (0, "0.parquet", 0),
            (1, "0.parquet", 1),
            *((n, "1.parquet", n - 3) for n in (3, 4, 5)),
        ]
    text = invoke("errors", planned, "--limit", 1).stdout
    assert f"run {planned}: 5 rows with an error" in text
    assert text.count("parquet") == 1
    assert "secret" not in text
    runs.output.rename(tmp_path / "moved")
    result = invoke("errors", planned)
    assert "   3  1, 3, 5  it is broken" in result.stdout
    assert "no such folder on this machine" in result.stderr
    assert json.loads(invoke("errors", tmp_path / "moved", "--json").stdout)["errors"] == 5
    assert invoke("errors", "f" * 16).exit_code == 1


def test_answers_are_shown_as_they_are_published_and_prompts_only_when_asked(
    runs: Runs, invoke: Invoke, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.write(["a", "b", "c\x1b[2J", None])
    output = runs.output
    run = runs.plan(output=output, rows_per_shard=1)["run"]
    assert invoke("tail", run).stdout == ""
    left = runs.jobs

    def publish(*_: Any) -> None:
        if left:
            job = left.pop()
            run_task(replace(runs.context(), job_id=job.id), job.func_name, *job.args)
            job.delete()

    publish()
    publish()
    assert invoke("tail", run).stdout == "row 3: error: prompt is null\nrow 2: C\\x1b[2J\n"
    assert invoke("tail", output, "-n", 1, "--prompts").stdout == (
        'row 2: {"prompt": "c\\u001b[2J", "completion": "C\\u001b[2J"}\n'
    )
    monkeypatch.setattr(folder_commands.time, "sleep", publish)
    lines = invoke("tail", run, "-n", 0, "-f", "--json").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [(each["row"], each["completion"]) for each in found] == [(1, "B"), (0, "A")]
    assert "prompt" not in found[0]
    redis.flushall()
    assert invoke("tail", output, "-f", "-n", 1).stdout == "row 0: A\n"
    assert invoke("tail", run).exit_code == 1


@pytest.mark.parametrize("columns", [{"drop": ["prompt"]}, {"keep": ["id"]}])
def test_prompts_that_the_output_does_not_have_are_not_shown(
    runs: Runs, invoke: Invoke, columns: Any
) -> None:
    runs.write(["a"])
    runs.score(**columns)
    assert invoke("tail", runs.output, "--prompts").stdout == "row 0: A\n"
