"""`tokenmill errors RUN --retry`: rows that failed are asked again, and take the errors' place, once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.context import Lease
from jobs.errors import RunBusy
from jobs.runs.control import retry_run
from jobs.tasks import OpenTask, Request
from jobs.watch.runs import list_runs
from tests.jobs.answering import FakeCompletion, feed, opened_task, queued_jobs, refuse, shout, work_off
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs

ROWS = 6


@pytest.fixture
def run(runs: Runs, tmp_path: Path) -> str:
    """A finished run of which rows 0, 2, 4 and 5 failed, the last for lack of a prompt."""
    prompts = [*(f"p{number}" for number in range(ROWS - 1)), None]
    pq.write_table(pa.table({"prompt": prompts, "id": range(ROWS)}), runs.source)

    def answer(request: Request) -> FakeCompletion:
        return refuse("no room") if request.prompt in ("p0", "p2", "p4") else shout(request)

    source, output = str(tmp_path / "in.parquet"), str(runs.output)
    planned = runs.plan(source, output, rows_per_shard=3)
    runs.work(answer=answer)
    return str(planned["run"])


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / "out").to_pylist()
    return found


def open_first_shard(redis: Redis, make_context: MakeContext, run: str, **changed: Any) -> OpenTask:
    """Plan a retry, and open its first shard as an execution of it would."""
    if not queued_jobs(redis):
        retry_run(redis, run)
        work_off(redis, make_context)
    job = queued_jobs(redis)[0]
    context = replace(make_context(), job_id=job.id, **changed)
    return opened_task(context, job.func_name, job.args, job.kwargs)


def test_only_rows_that_failed_are_asked_and_all_others_stay_as_they_are(
    runs: Runs, redis: Redis, run: str, invoke: Invoke, tmp_path: Path
) -> None:
    before, asked = rows(tmp_path), list[Any]()
    assert invoke("errors", run, "--retry").exit_code == 0
    while jobs := runs.jobs:
        if jobs[0].func_name == "jobs.score_shard":
            job = jobs[0]
            answer = lambda request: asked.append(request.prompt) or shout(request)  # noqa: E731
            runs.run(job, answer=answer)
            job.delete()
        else:
            runs.work()
    assert sorted(asked) == ["p0", "p2", "p4"]
    after = rows(tmp_path)
    assert [row["completion"] for row in after] == ["P0", "P1", "P2", "P3", "P4", None]
    assert [after[number] for number in (1, 3, 5)] == [before[number] for number in (1, 3, 5)]
    manifest = runs.manifest
    assert (manifest["errors"], manifest["rows"]) == (1, ROWS)
    assert (runs.output / "_SUCCESS").is_file()
    (found,) = list_runs(redis)
    assert (found.state, found.rows_done, found.errors) == ("finished", ROWS, 1)


def test_two_executions_of_a_retry_never_give_an_answer_up_for_an_error(
    redis: Redis, make_context: MakeContext, run: str, tmp_path: Path
) -> None:
    slow, fast = (open_first_shard(redis, make_context, run) for _ in range(2))
    feed(fast)
    fast.result()
    answered = rows(tmp_path)
    feed(slow, lambda request: refuse("too late"))
    slow.result()
    assert rows(tmp_path) == answered
    for task in (slow, fast):
        task.close()


def test_who_has_lost_the_job_puts_no_part_in_place(
    redis: Redis, make_context: MakeContext, run: str, tmp_path: Path
) -> None:
    before = rows(tmp_path)
    task = open_first_shard(redis, make_context, run, lease=Lease("rq:executions:x", "gone"))
    feed(task)
    with pytest.raises(RunBusy):
        task.result()
    task.close()
    assert rows(tmp_path) == before
    assert not list((tmp_path / "out").glob("_tmp*"))
