"""A run with a deadline begins no row after it. Each row that was not begun says so, and can be asked again."""

import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from jobs.cli import status_text
from jobs.common.keys import run_key
from jobs.context.deadlines import EXPIRED, parse_deadline
from jobs.context.job_journal import JobJournal, SentTokens
from jobs.errors import DeadlinePassed, InvalidValue
from jobs.parquet.shards import shard_work
from jobs.runs.redis_state.submission import Submission
from jobs.runs.watching.reading import read_snapshot
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, opened_task, refuse, run_task, shard_of, shout
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs

LONG_AGO = "2020-01-01T00:00:00+00:00"


class Clock:
    """Stands for the module `time` of a shard's file: the time is what the test says."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shard_work, "time", SimpleNamespace(time=clock.time))
    return clock


def submit(invoke: Invoke, source: Path, *options: object) -> str:
    result = invoke("submit", source, source.parent / "out", "--rows-per-shard", 4, *options)
    assert result.exit_code == 0, result.output
    return str(result.stdout.strip())


def test_rows_that_were_begun_are_answered_and_the_others_say_why_not(
    runs: Runs, invoke: Invoke, redis: Redis, clock: Clock
) -> None:
    source = runs.write([f"row {row}" for row in range(12)])
    run = submit(invoke, source, "--deadline", "2023-11-14T22:30:00+00:00")
    runs.work()  # the planning

    def answer(request: Request) -> FakeCompletion:
        """Answer; the deadline comes while the second shard runs, of which all rows have begun."""
        if "row 5" in str(request.prompt):
            clock.now = 1_700_001_000.0
        return shout(request)

    runs.work(answer=answer)
    rows = pq.read_table(source.parent / "out").to_pylist()
    assert [row["completion"] for row in rows[:8]] == [f"ROW {row}" for row in range(8)]
    assert [row["error"] for row in rows] == [None] * 8 + [EXPIRED] * 4
    assert [row["completion"] for row in rows[8:]] == [None] * 4
    shown = invoke("status", run).stdout
    assert f"run {run}: expired" in shown
    assert "4 rows were not begun before the deadline" in shown
    assert read_snapshot(redis, run).expired == 4

    again = invoke("errors", run, "--retry", source.parent / "again")
    assert again.exit_code == 0, again.output
    runs.work()
    runs.work()
    rows = pq.read_table(source.parent / "again").to_pylist()
    assert [row["completion"] for row in rows] == [f"ROW {row}" for row in range(12)]


def test_a_row_that_waits_within_a_shard_under_way_is_not_begun(clock: Clock, runs: Runs) -> None:

    runner = shard_of(
        ["a", "b", "c", "b"], {"temperature": 0}, is_over=lambda: clock.now >= 1_700_001_000.0
    )
    requests = runner.requests()
    first = next(requests)
    assert first.prompt == "a"
    clock.now = 1_700_001_000.0
    assert list(requests) == []
    runner.deliver(0, [shout(first)])
    assert [answer.error for answer in runner.answers()] == [None, EXPIRED, EXPIRED, EXPIRED]
    assert runner.counts.done == 4
    assert [answered.place for answered in runner.answered] == [0], "a journal holds no expired row"


def test_a_shard_under_way_takes_on_the_deadline_of_a_later_submission(
    runs: Runs, invoke: Invoke, clock: Clock
) -> None:
    source = runs.write([f"row {row}" for row in range(4)])
    submit(invoke, source, "--deadline", "2023-11-14T22:30:00+00:00")
    runs.work(but=["jobs.score_shard"])
    (job,) = runs.jobs
    task = opened_task(runs.context(), job.func_name, job.args, job.kwargs)
    requests = task.requests()
    first = next(requests)

    submit(invoke, source, "--deadline", "2023-11-14T23:30:00+00:00")
    runs.work(but=["jobs.score_shard"])
    write = task.keep({})
    assert write is not None, "rows wait, so the deadline matters"
    write()
    clock.now = 1_700_001_000.0
    others = list(requests)
    for index, request in enumerate([first, *others]):
        task.deliver(index, [shout(request)])
    task.result()
    task.close()
    assert [row["error"] for row in runs.rows()] == [None] * 4


def test_rows_that_the_deadline_left_do_not_count_as_errors_for_the_limit(
    runs: Runs, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = runs.write([f"row {row}" for row in range(12)])
    monkeypatch.setattr(status_text.time, "sleep", lambda seconds: runs.work())
    options = ("--deadline", LONG_AGO, "--max-errors", "0", "--wait")
    result = invoke("submit", source, source.parent / "out", *options)
    assert result.exit_code == 1, "rows are missing"
    assert "it is expired: 12 rows were not begun before the deadline" in result.stderr
    assert (source.parent / "out" / "_SUCCESS").exists()


def test_a_real_error_still_stops_a_run_with_a_deadline(
    runs: Runs, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = runs.write([f"row {row}" for row in range(12)])
    answer = lambda request: refuse("too long")  # noqa: E731
    monkeypatch.setattr(status_text.time, "sleep", lambda seconds: runs.work(answer=answer))
    options = ("--deadline", "1h", "--max-errors", "0", "--wait")
    result = invoke("submit", source, source.parent / "out", *options)
    assert result.exit_code == 1
    assert "rows have an error, more than --max-errors 0 allows" in result.stderr


def test_lines_of_a_batch_file_that_were_not_begun_have_openais_code(
    runs: Runs, invoke: Invoke, tmp_path: Path
) -> None:
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x"},
        }
        for number in range(3)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    submit(invoke, source, "--input-format", "openai-batch", "--deadline", LONG_AGO)
    runs.work()
    runs.work()
    errors = [
        json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()
    ]
    assert [line["custom_id"] for line in errors] == ["line 0", "line 1", "line 2"]
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert (tmp_path / "out" / "output.jsonl").read_text() == ""


def test_a_later_submission_takes_a_deadline_back(runs: Runs, invoke: Invoke, redis: Redis) -> None:
    source = runs.write(["a"])
    run = submit(invoke, source, "--deadline", "2h")
    left_s = (read_snapshot(redis, run).deadline or 0) - time.time()
    assert 7100 < left_s <= 7200
    assert "deadline " in invoke("status", run).stdout or read_snapshot(redis, run).rows is None
    submit(invoke, source)
    assert read_snapshot(redis, run).deadline is None


def test_a_later_submission_takes_a_priority_back(runs: Runs, invoke: Invoke, redis: Redis) -> None:
    source = runs.write(["a"])
    run = submit(invoke, source, "--priority", "4")
    assert redis.hget(run_key(run), "priority") == b"4"
    submit(invoke, source)
    assert redis.hget(run_key(run), "priority") is None


@pytest.mark.parametrize("priority", [0, 101, 1.5, True])
def test_what_is_no_priority_is_refused(priority: object) -> None:
    with pytest.raises(InvalidValue, match="expected an integer from 1 to 100"):
        Submission.split("bulk", {"priority": priority})


def test_a_job_that_begins_after_its_deadline_fails_by_name(runs: Runs) -> None:
    context = runs.context()
    with pytest.raises(
        DeadlinePassed, match="2020-01-01T00:00:00Z passed before this job was begun"
    ):
        run_task(context, "jobs.complete", "a", deadline=LONG_AGO)
    assert run_task(context, "jobs.complete", "a", deadline="1h")["choices"][0]["text"] == "A"
    with pytest.raises(InvalidValue, match="deadline is 'soon', expected a duration"):
        run_task(context, "jobs.complete", "a", deadline="soon")


def test_a_job_that_another_worker_has_begun_goes_on_after_its_deadline(
    runs: Runs, redis: Redis
) -> None:
    journal = JobJournal(redis, "begun", "owner", None, sent=[SentTokens(0, 0, [1])])
    context = replace(runs.context(), journal=journal)
    answer = run_task(context, "jobs.complete", "a", deadline=LONG_AGO)
    assert answer["choices"][0]["text"] == "A"


@given(st.integers(1, 10**6 - 1), st.sampled_from("smhd"))
def test_durations_count_from_now_and_times_are_what_they_say(count: int, unit: str) -> None:
    seconds = count * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert parse_deadline("deadline", f"{count}{unit}", 1000.0) == 1000.0 + seconds
    moment = datetime.fromtimestamp(seconds, UTC).isoformat() if seconds < 10**9 else LONG_AGO
    assert parse_deadline("deadline", moment) == datetime.fromisoformat(moment).timestamp()
    assert parse_deadline("deadline", 10**9 + seconds) == 10**9 + seconds
    assert parse_deadline("deadline", timedelta(seconds=seconds), 1000.0) == 1000.0 + seconds
    assert (
        parse_deadline("deadline", datetime.fromisoformat(moment))
        == datetime.fromisoformat(moment).timestamp()
    )


@pytest.mark.parametrize(
    "value",
    [
        "",
        "2",
        "-1h",
        "1 h",
        "2026-12-01T08:00:00",
        "1969-12-31T00:00:00Z",
        "9999-12-31T00:00:00Z",
        "1y",
        True,
        0,
        -1,
        3600,
        float("nan"),
        [],
        1e300,
        10**400,
    ],
)
def test_what_is_no_deadline_is_refused(value: object) -> None:
    with pytest.raises(
        InvalidValue, match=r"deadline is .*, expected a duration from now like 90s"
    ):
        parse_deadline("deadline", value)
