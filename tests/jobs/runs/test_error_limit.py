"""A run of which too many rows fail is stopped, says so, and can be resumed."""

from pathlib import Path
from random import Random
from uuid import uuid4

import pytest
from click import ClickException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from rq.job import Job

import jobs
from jobs.cli import status_text
from jobs.common.keys import run_key
from jobs.errors import InvalidValue, RunFailed
from jobs.runs.redis_state.state import RunState
from jobs.runs.redis_state.submission import ErrorLimit
from jobs.runs.watching.reading import list_runs, read_snapshot
from jobs.tasks import OpenTask, Request
from tests.examples import examples
from tests.jobs.answering import FakeCompletion, refuse, shout
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs


def refuse_all(request: object) -> FakeCompletion:
    return refuse("too long")


@pytest.fixture
def source(runs: Runs) -> Path:
    return runs.write([f"{row}" for row in range(500)])


def submit(invoke: Invoke, source: Path, *options: object) -> str:
    result = invoke("submit", source, source.parent / "out", "--rows-per-shard", 100, *options)
    assert result.exit_code == 0, result.output
    return str(result.stdout.strip())


def test_a_run_whose_rows_all_fail_is_stopped_and_named_and_resumed_with_a_higher_limit(
    runs: Runs, invoke: Invoke, redis: Redis, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit(invoke, source)
    runs.work()  # the planning
    first = runs.jobs[0]
    runs.run(first, answer=refuse_all)
    assert [job.id for job in runs.jobs] == [first.id]  # what waited is gone; this one runs
    text = invoke("status", run).stdout
    assert f"run {run}: stopped" in text
    assert "100 of 100 rows have an error, more than --max-errors 90% allows" in text
    redis.delete("rq:queue:bulk")
    submit(invoke, source, "--max-errors", "100%")
    assert runs.work()[0]["shards_missing"] == 4
    monkeypatch.setattr(status_text.time, "sleep", lambda seconds: runs.work(refuse_all))
    submit(invoke, source, "--max-errors", "100%", "--wait")  # all its rows may fail
    assert (source.parent / "out" / "_SUCCESS").exists()
    assert f"run {run}: finished" in invoke("status", run).stdout


def test_a_run_that_passes_the_limit_with_its_last_part_is_stopped_until_the_limit_is_higher(
    runs: Runs, invoke: Invoke, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(
        request: Request,
    ) -> FakeCompletion:  # the run's last rows alone fail: nothing is left to stop
        return refuse("x") if int(str(request.prompt)) >= 400 else shout(request)

    monkeypatch.setattr(status_text.time, "sleep", lambda seconds: runs.work(answer=answer))
    for limit, status in (("99", 1), ("99", 1), ("100", 0)):
        options = ("--wait", "--rows-per-shard", 100, "--max-errors", limit)
        result = invoke("submit", source, source.parent / "out", *options)
        assert ("stopped" if status else "finished") in result.stdout
        assert result.exit_code == status, result.output
        assert (source.parent / "out" / "_SUCCESS").exists() is not bool(status)
        told = "100 of 500 rows have an error, more than --max-errors 99 allows"
        shown = invoke("status", source.parent / "out").stdout
        assert (told in result.stderr, told in shown) == (bool(status), bool(status))


@pytest.mark.parametrize(
    ("limit", "rows", "errors", "passed"),
    [
        (None, 1000, 900, False),
        (None, 1000, 901, True),
        (None, 99, 99, False),  # too few to judge
        ("5%", 100, 6, True),
        ("3", 4, 4, True),
    ],
)
def test_the_limit_is_a_number_of_rows_or_a_share(
    limit: int | str | None, rows: int, errors: int, passed: bool
) -> None:
    assert (ErrorLimit.parse(limit).excess(rows, errors) is not None) is passed
    assert ErrorLimit.parse(str(ErrorLimit.parse(limit))) == ErrorLimit.parse(limit)


def test_a_share_that_was_set_holds_for_a_small_run_when_it_ends(
    runs: Runs, invoke: Invoke
) -> None:
    """Four of eight rows: the default share judges none so small, which may be a trial."""
    runs.write([str(number) for number in range(8)])

    def answer(request: Request) -> FakeCompletion:
        return refuse("x") if int(str(request.prompt)) % 2 else shout(request)

    run = invoke("submit", runs.source, runs.output, "--max-errors", "10%").stdout.strip()
    for _ in range(2):
        runs.work(answer)
    assert f"run {run}: stopped" in invoke("status", run).stdout
    assert not (runs.output / "_SUCCESS").exists()


@pytest.mark.parametrize("limit", ["many", -1, "120%", 0.5, True])
def test_a_limit_that_is_none_is_refused(limit: object) -> None:
    with pytest.raises(
        InvalidValue, match=r"max_errors is .*, expected a number of rows, or a share"
    ):
        ErrorLimit.parse(limit)


@pytest.mark.parametrize(
    ("rows", "reason"), [(1, "its only row has an error"), (5, "all its 5 rows have an error")]
)
def test_a_run_all_of_whose_rows_fail_has_failed_however_few_they_are(
    runs: Runs, invoke: Invoke, redis: Redis, rows: int, reason: str
) -> None:
    runs.write(["a"] * rows)
    run = invoke("submit", runs.source, runs.output).stdout.strip()
    for _ in range(2):
        runs.work(refuse_all)
    assert f"run {run}: failed" in invoke("status", run).stdout
    assert [each.state for each in list_runs(redis)] == ["failed"]
    with pytest.raises(ClickException, match=reason):  # exit status 1
        status_text.wait_for_end(redis, run)
    with pytest.raises(RunFailed, match=reason):
        jobs.run(run, connection=redis).wait(timeout=0)


def test_a_parts_errors_count_once_however_often_it_is_recorded(redis: Redis, runs: Runs) -> None:
    runs.write([*"abcd"])
    run = runs.plan(rows_per_shard=1)["run"]
    redis.hset(run_key(run), "max_errors", "1")
    first, second, *_ = runs.jobs
    state = RunState(redis, run)
    for _ in range(3):  # another execution, or the same again after its worker was killed
        runs.run(first, answer=lambda request: refuse("x"))
    assert state.judge() is None
    assert not state.is_cancelled()
    runs.run(second, answer=lambda request: refuse("x"))
    assert state.is_cancelled()


@given(
    bad=st.lists(st.integers(0, 100), min_size=2, max_size=4),
    limit=st.sampled_from(["5%", "40%", "30", "150"]),
    order=st.randoms(use_true_random=False),
    num_open=st.integers(1, 4),
)
@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_run_beyond_its_limit_never_gets_the_mark_of_its_end_whatever_order_shards_end_in(
    runs: Runs, redis: Redis, bad: list[int], limit: str, order: Random, num_open: int
) -> None:
    """num_open: shards that run at once, and so go on when the run is stopped."""
    redis.flushdb()
    output = runs.output.parent / f"out-{uuid4().hex}"
    fails = [number < count for count in bad for number in range(100)]
    runs.write([f"{'bad' if fail else 'good'} {row}" for row, fail in enumerate(fails)])
    run = runs.plan(output=output, rows_per_shard=100, max_errors=limit)["run"]

    def answer(request: Request) -> FakeCompletion:
        return refuse("x") if str(request.prompt).startswith("bad") else shout(request)

    waiting = runs.jobs
    order.shuffle(waiting)
    was_stopped, is_open = False, list[tuple[Job, OpenTask]]()
    while waiting or is_open:
        still_queued = {job.id for job in runs.jobs}
        while waiting and len(is_open) < num_open:
            job = waiting.pop()
            if job.id in still_queued:
                is_open.append((job, runs.answered(job, answer)))
        if not is_open:
            break
        _, task = is_open.pop(order.randrange(len(is_open)))
        task.result()
        task.close()
        was_stopped |= RunState(redis, run).is_cancelled()
        has_end = (output / "_SUCCESS").exists()
        assert not (was_stopped and has_end)
    is_whole = len(list(output.glob("part-*.parquet"))) == len(bad)
    is_beyond = ErrorLimit.parse(limit).excess(len(fails), sum(fails)) is not None
    if is_beyond:
        assert was_stopped
    assert (output / "_SUCCESS").exists() is (is_whole and not was_stopped)
    state = read_snapshot(redis, run).state
    assert state == ("stopped" if was_stopped else "finished")

    # With a higher limit it ends.
    redis.delete("rq:queue:bulk")
    runs.plan(output=output, rows_per_shard=100, max_errors="100%")
    runs.work(answer)
    assert (output / "_SUCCESS").exists()
