"""`jobs.submit` and `jobs.run`: what the command line does, from Python."""

import asyncio
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from datasets import Dataset
from redis import Redis

import jobs
from jobs import client, errors
from jobs.errors import RunFailed, RunNotHere
from jobs.prompts.arguments import SAMPLING_NAMES
from jobs.prompts.ways.table import WAY_OPTIONS
from jobs.runs.plans.spec import RunSpec
from jobs.runs.redis_state.submission import SUBMISSION_ARGUMENTS
from jobs.runs.run_options import RunOptions
from jobs.runs.watching.snapshot import RunSnapshot
from tests.jobs.answering import add_worker, queued_jobs
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs

ROWS = {"prompt": ["b", "a", None], "id": [1, 2, 3]}


def finish(runs: Runs) -> None:
    while runs.jobs:
        runs.work()


@pytest.fixture(autouse=True)
def _server(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RQ_REDIS_URL", redis_url)


def test_a_run_is_submitted_awaited_and_read(
    runs: Runs, redis: Redis, source: Path, invoke: Invoke
) -> None:
    output = runs.output
    run = jobs.submit(source, output, max_tokens=3, temperature=0, rows_per_shard=2)
    assert run.status().state == "planning"
    with pytest.raises(RunNotHere, match="no such folder"):
        run.table()
    arguments = ["--max-tokens", 3, "--temperature", 0, "--rows-per-shard", 2]
    assert invoke("submit", source, output, *arguments).stdout.strip() == run.id  # the same run
    with pytest.raises(TimeoutError, match="no worker listens on queue"):
        run.wait(timeout=0)
    runs.work()
    with pytest.raises(RunNotHere, match="_SUCCESS"):
        run.table()
    finish(runs)
    found = run.wait(timeout=5)
    assert (found.state, found.rows_done, found.errors) == ("finished", 5, 1)
    assert run.table()["completion"].to_pylist() == [*"ABCD", None]
    (row,) = run.errors()
    assert (row.row, row.file, row.file_row, row.reason) == (4, str(source), 4, "prompt is null")
    again = jobs.run(output)
    assert (again.id, again.output, again.table()) == (run.id, str(output), run.table())
    assert jobs.run(run.id, connection=redis).status().state == "finished"
    redis.flushall()
    assert jobs.run(str(output)).errors() == [row]
    with pytest.raises(errors.UnknownRun):
        jobs.run(run.id)


@pytest.mark.parametrize(
    "given",
    [
        pd.DataFrame(ROWS),
        pl.DataFrame(ROWS),
        pa.table(ROWS),
        pa.RecordBatchReader.from_batches(pa.table(ROWS).schema, pa.table(ROWS).to_batches()),
        duckdb.from_arrow(pa.table(ROWS)),
        Dataset.from_dict(ROWS),
    ],
    ids=["pandas", "polars", "arrow", "reader", "duckdb", "datasets"],
)
def test_tables_are_written_beside_the_output_and_scored(
    given: Any, runs: Runs, tmp_path: Path
) -> None:
    run = jobs.submit(given, runs.output)
    (file,) = (tmp_path / "out.input").iterdir()
    assert file.suffix == ".parquet"
    finish(runs)
    run.wait(timeout=5)
    assert run.table()["id"].to_pylist() == [1, 2, 3]
    assert run.table()["completion"].to_pylist() == ["B", "A", None]


def test_rows_come_back_as_a_polars_frame(runs: Runs) -> None:
    run = jobs.submit(pl.DataFrame(ROWS), runs.output)
    finish(runs)
    frame = run.polars()
    assert isinstance(frame, pl.DataFrame)
    assert frame["completion"].to_list() == ["B", "A", None]


def test_a_bar_shows_the_progress_on_stderr(
    runs: Runs, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = jobs.submit(source, runs.output)
    finish(runs)
    run.wait(timeout=5, progress=True)
    assert "finished: 100%" in capsys.readouterr().err


def test_a_run_is_awaited_while_other_tasks_run(runs: Runs, source: Path) -> None:
    run = jobs.submit(source, runs.output)

    async def wait_and_work() -> RunSnapshot:
        waiting = asyncio.create_task(run.wait_async(timeout=60))
        await asyncio.to_thread(finish, runs)
        return await waiting

    assert asyncio.run(wait_and_work()).state == "finished"


def test_a_wait_that_is_cancelled_ends_its_thread(runs: Runs, source: Path) -> None:
    run = jobs.submit(source, runs.output)

    async def cancel() -> None:
        waiting = asyncio.create_task(run.wait_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancel())  # it joins the threads of `to_thread`


def test_each_option_of_a_run_has_a_name_a_type_and_a_sentence() -> None:
    of_run = {field.name for field in fields(RunSpec)} - {"input", "output", "way_options"}
    sampling = SAMPLING_NAMES - {"echo"}  # no run has it
    expected = {
        *of_run,
        *sampling,
        *SUBMISSION_ARGUMENTS,
        *WAY_OPTIONS,
        *client._ARGUMENT_OF,
        *client._CHECK_KINDS,
    }
    expected.add("adapter_column")  # which becomes one of sampling_columns
    assert set(RunOptions.__annotations__) == expected
    source = inspect.getsource(RunOptions)
    sentences = re.findall(r'^    (\w+): .+\n    """[^"\n].*\.', source, re.MULTILINE)
    assert sentences == list(RunOptions.__annotations__)
    signature = inspect.signature(jobs.submit)
    assert set(signature.parameters) >= expected
    assert signature.parameters["max_tokens"].annotation is int


def test_the_same_table_is_the_same_run_and_another_is_refused(runs: Runs, tmp_path: Path) -> None:
    frame = pd.DataFrame(ROWS)
    first = jobs.submit(frame, runs.output)
    finish(runs)
    assert jobs.submit(frame.copy(), runs.output).id == first.id
    finish(runs)
    assert first.wait(timeout=5).state == "finished"
    assert jobs.submit(frame.head(1), runs.output).id != first.id
    with pytest.raises(errors.OutputHoldsAnotherRun):
        runs.work()
    assert jobs.submit(frame, tmp_path / "b", input_folder=tmp_path / "mine").id
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_what_cannot_be_is_refused_before_anything_is_queued_or_written(
    redis: Redis, source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (source, {"max_tokens": "64"}, "max_tokens"),
        (source, {"prompt_column": "text"}, "no column 'text'"),
        (pl.LazyFrame(ROWS), {}, "collect"),
        (pl.Series(["a"]), {}, "to_frame"),
        (pd.Series(["a"]), {}, "to_frame"),
        (pd.DataFrame({"m": [1, "a"]}), {}, "column m .*: convert, rename or leave out"),
        (pl.DataFrame({"i": pl.Series([1], dtype=pl.Int128)}), {}, "column 'i' of type Int128"),
        (7, {}, "expected paths, a pandas"),
        ([], {}, "empty list"),
    ]
    for given, arguments, text in refused:
        with pytest.raises(errors.JobsError, match=text):
            jobs.submit(given, output, **arguments)
    assert queued_jobs(redis) == []
    assert not list(tmp_path.rglob("_tmp*"))


def test_options_have_the_command_lines_names(source: Path, tmp_path: Path, invoke: Invoke) -> None:
    run = jobs.submit(
        source,
        tmp_path / "out",
        messages_template=[{"role": "user", "content": "{prompt}"}],
        check_regex="a+",
        output_format="csv",
        default={"prompt": "-"},
        stop=["x"],
    )
    options = [
        "--messages-template",
        '[{"role": "user", "content": "{prompt}"}]',
        "--check-regex",
        "a+",
    ]
    options += ["--single-file", "--output-format", "csv", "--default", "prompt=-", "--stop", "x"]
    assert invoke("submit", source, tmp_path / "out", *options).stdout.strip() == run.id


def test_ways_to_an_answer_are_planned_as_submitted(
    source: Path, runs: Runs, invoke: Invoke
) -> None:
    agreement = {"agree": 0.7, "max_samples": 8}
    run = jobs.submit(source, runs.output, **agreement)
    options = ["--agree", 0.7, "--max-samples", 8]
    assert invoke("submit", source, runs.output, *options).stdout.strip() == run.id
    assert runs.work()[0]["run"] == run.id
    plan = json.loads((runs.output / "_plan.json").read_text())
    assert agreement.items() <= plan["arguments"].items()
    runs.work()
    assert (runs.output / "_SUCCESS").exists()
    assert {"votes", "samples"} <= runs.rows()[0].keys()


def test_a_run_that_ended_otherwise_says_how(runs: Runs, redis: Redis, source: Path) -> None:
    add_worker(redis, "w")
    run = jobs.submit(source, runs.output, rows_per_shard=1)
    runs.work()
    assert run.cancel().removed == 5
    with pytest.raises(RunFailed, match="it was cancelled"):
        run.wait(timeout=5)
    jobs.submit(source, runs.output, rows_per_shard=1, max_errors=0)
    runs.work()
    finish(runs)
    with pytest.raises(RunFailed, match="1 of 5 rows have an error"):
        run.wait(timeout=5)


def test_without_pyarrow_runs_are_submitted_and_what_needs_it_says_so(
    redis_url: str, redis: Redis, source: Path, tmp_path: Path
) -> None:
    code = f"""
import sys
sys.modules["pyarrow"] = None
import jobs
run = jobs.submit({str(source)!r}, {str(tmp_path / "out")!r})
assert run.status().state == "planning"
for call in (run.table, run.errors, lambda: jobs.submit(object(), {str(tmp_path / "o")!r})):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count("needs pyarrow") == 3, done.stderr
    assert [job.func_name for job in queued_jobs(redis)] == ["jobs.score_parquet"]


def test_a_misspelt_argument_is_refused_with_the_nearest_one(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        errors.InvalidJob,
        match=r"'temperatur' is no argument of submit; did you mean temperature\?",
    ):
        jobs.submit(source, tmp_path / "out", temperatur=0)


def every_extension_type() -> pd.DataFrame:
    """A frame with nulls in a column of each of pandas' own types, and an index."""
    big = 2**60 + 1
    days = pd.to_datetime(["2020-01-01", None, "2020-03-01"])
    columns: dict[str, Any] = {
        "id": pd.array([big, None, 3], dtype="Int64"),
        "Float64": pd.array([1.5, None, 3], dtype="Float64"),
        "boolean": pd.array([True, None, False], dtype="boolean"),
        "bool": [True, False, True],
        "string": pd.array(["a", None, "c"], dtype="string"),
        "category": pd.Categorical(["x", None, "y"], categories=["y", "x"], ordered=True),
        "datetimetz": days.tz_localize("Europe/Berlin"),
        "period": days.to_period("M"),
    }
    return pd.DataFrame(
        {"prompt": ["b", "a", "c"], **columns}, index=pd.Index([7, 5, 3], name="key")
    )


def test_a_frame_comes_back_with_its_types_and_index(runs: Runs) -> None:
    given = every_extension_type()
    run = jobs.submit(given, runs.output, rows_per_shard=2)
    finish(runs)
    frame = run.frame()
    assert frame["id"][7] == 2**60 + 1
    pd.testing.assert_frame_equal(frame[given.columns], given)
    pd.testing.assert_frame_equal(run.table().to_pandas(), frame)
    assert frame["completion"].tolist() == ["B", "A", "C"]
    assert not [key for key in run.table().schema.metadata if key.startswith(b"tokenmill")]


def test_a_run_that_was_refused_gives_none_of_the_rows_of_the_run_that_its_folder_holds(
    runs: Runs, redis: Redis, source: Path
) -> None:
    first = jobs.submit(source, runs.output, rows_per_shard=2)
    runs.work()
    finish(runs)
    refused = jobs.submit(source, runs.output, template="Other: {prompt}")
    with pytest.raises(errors.OutputHoldsAnotherRun):
        runs.work()
    redis.delete("rq:queue:bulk")
    for read in (
        refused.frame,
        refused.table,
        refused.errors,
        lambda: refused.retry(runs.output.parent / "new"),
    ):
        with pytest.raises(RunNotHere, match=f"there is run {first.id}, not this one"):
            read()
    assert first.table().num_rows == 5
