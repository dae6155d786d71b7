"""`tokenmill errors RUN --retry`: rows that failed are asked again, and take the errors' place, once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli import waiting
from jobs.context import JobContext, Lease
from jobs.errors import (
    InputChanged,
    InvalidJob,
    PlanningUnderWay,
    RunBusy,
    RunOfAnotherModel,
)
from jobs.parquet import part, retry_work
from jobs.parquet.retry_work import RetryWork
from jobs.parquet.storage import Storage
from jobs.runs.control import retry_run, submit_run
from jobs.runs.redis_state.state import RunState
from jobs.runs.refusals import CannotRetry
from jobs.table import own_function
from jobs.tasks import Request
from jobs.watch.runs import list_runs, list_shards, read_run
from tests.jobs.answering import (
    FakeCompletion,
    feed,
    opened_task,
    queued_jobs,
    refuse,
    run_task,
    score_parquet,
)
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]
ROWS = 10


def flaky(request: Request) -> FakeCompletion:
    """Rows whose number is divisible by three fail."""
    if int(str(request.prompt).split()[1]) % 3 == 0:
        return refuse(f"the engine had no room for {request.prompt}")
    return sound(request)


def sound(request: Request) -> FakeCompletion:
    text = f"{request.prompt} {request.sampling.get('seed')}"
    return FakeCompletion(text, 0, [1] * len(text), "stop", 7, 3)


class Site:
    """A finished run of which rows failed, and what is done with it."""

    def __init__(self, redis: Redis, make_context: MakeContext, folder: Path, **arguments: Any) -> None:
        self.redis, self.make_context, self.output = redis, make_context, folder / "out"
        self.input = folder / "in.parquet"
        prompts = [f"row {number}" if number != 7 else None for number in range(ROWS)]
        table = pa.table({"prompt": prompts, "id": range(ROWS)}).replace_schema_metadata({"of": "the user"})
        pq.write_table(table, self.input)
        arguments = {"rows_per_shard": 3, **arguments}
        self.run = score_parquet(make_context(), str(self.input), str(self.output), **arguments)["run"]
        self.work(flaky)

    def work(self, answer: Callable[[Request], FakeCompletion] = sound) -> list[Request]:
        asked: list[Request] = []

        def noted(request: Request) -> FakeCompletion:
            asked.append(request)
            return answer(request)

        while found := queued_jobs(self.redis):
            for job in found:
                context = replace(self.make_context(), job_id=job.id)
                if (function := own_function(job.func_name)) is not None:
                    function(context, *job.args, **job.kwargs)
                else:
                    run_task(context, job.func_name, *job.args, answer=noted, **job.kwargs)
                job.delete()
        return asked

    @property
    def parts(self) -> list[dict[str, Any]]:
        found = sorted(self.output.rglob("part-*.parquet"))
        return [row for path in found for row in pq.read_table(path).to_pylist()]

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "_manifest.json").read_text()))


@pytest.fixture
def site(redis: Redis, make_context: MakeContext, tmp_path: Path) -> Site:
    return Site(redis, make_context, tmp_path)


def failed(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows if row["error"] is not None]


def test_only_rows_that_failed_are_asked_and_all_others_stay_as_they_are(site: Site, invoke: Invoke) -> None:
    before = site.parts
    assert failed(before) == [0, 3, 6, 7, 9]
    told = invoke("errors", site.run, "--retry")
    assert told.exit_code == 0, told.output
    asked = site.work()
    assert sorted(str(request.prompt) for request in asked) == ["row 0", "row 3", "row 6", "row 9"]
    after = site.parts
    assert failed(after) == [7]
    assert [row["id"] for row in after] == list(range(ROWS))
    same = [number for number in range(ROWS) if number not in (0, 3, 6, 9)]
    assert [after[number] for number in same] == [before[number] for number in same]
    seeds = {str(request.prompt): request.sampling["seed"] for request in asked}
    assert after[3]["completion"] == f"row 3 {seeds['row 3']}"
    assert (site.output / "_SUCCESS").is_file()
    assert (site.manifest["errors"], site.manifest["rows"]) == (1, ROWS)
    assert site.manifest["prompt_tokens"] == sum(row["prompt_tokens"] for row in after)
    assert site.manifest["completion_tokens"] == sum(row["completion_tokens"] for row in after)
    schema = pq.read_schema(site.output / "part-00001.parquet")
    assert schema.names == pq.read_schema(site.output / "part-00003.parquet").names
    assert schema.metadata[b"of"] == b"the user"
    (found,) = list_runs(site.redis)
    assert (found.state, found.rows_done, found.errors) == ("finished", ROWS, 1)
    assert [(each.text, each.examples) for each in read_run(site.redis, site.run).reasons] == [
        ("prompt is null", [7])
    ]
    names = {path.name for path in site.output.iterdir() if not path.name.startswith("part-")}
    assert names == {"_plan.json", "_manifest.json", "_report.html", "_SUCCESS"}


def test_the_time_before_a_retry_counts_as_no_work(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the manifest, a shard's time or a list; that it was there is told by `seconds`."""
    before, tokens = site.manifest, read_run(site.redis, site.run).summary.tokens
    pause_s = 100_000.0
    begin = partialmethod(RetryWork.__init__, clock=lambda: time.time() + pause_s)
    monkeypatch.setattr(RetryWork, "__init__", begin)
    retry_run(site.redis, site.run)
    site.work()
    (found,) = list_runs(site.redis)
    after = site.manifest
    assert after["seconds"] > pause_s
    worked_s = after["statistics"]["working_seconds"]
    assert before["statistics"]["working_seconds"] < worked_s < pause_s / 2
    assert after["statistics"]["worker_seconds"] < pause_s / 2
    assert sum(after["statistics"]["timeline"]["tokens"]) == pytest.approx(after["generated_tokens"], abs=10)
    assert found.tokens > tokens
    assert found.worked_s == pytest.approx(worked_s)
    assert found.rows_per_s == pytest.approx(ROWS / worked_s)
    assert all(each.seconds < pause_s / 2 for each in list_shards(site.redis, site.run))


def test_a_retry_may_be_awaited(site: Site, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: site.work())
    told = invoke("errors", site.run, "--retry", "--wait")
    assert told.exit_code == 0, told.output
    assert f"rows     {ROWS} of {ROWS}, 1 with an error" in told.output
    assert "--wait is for --retry" in invoke("errors", site.run, "--wait").output


def test_seeds_are_those_that_the_rows_had(redis: Redis, make_context: MakeContext, tmp_path: Path) -> None:
    site = Site(redis, make_context, tmp_path, sampling={"seed": 3})
    retry_run(redis, site.run)
    site.work()
    (tmp_path / "again").mkdir()
    whole = Site(redis, make_context, tmp_path / "again", sampling={"seed": 3})
    whole_rows = whole.parts
    retry_run(redis, whole.run)
    whole.work()
    assert whole_rows != whole.parts
    assert [row["completion"] for row in whole.parts] == [row["completion"] for row in site.parts]


def test_rows_that_fail_again_leave_the_run_finished_with_the_newest_reasons(site: Site) -> None:
    retry_run(site.redis, site.run)
    site.work(lambda request: refuse("still no room"))
    assert failed(site.parts) == [0, 3, 6, 7, 9]
    assert {row["error"] for row in site.parts if row["id"] in (0, 3, 6, 9)} == {"still no room"}
    assert (site.output / "_SUCCESS").is_file()
    assert list_runs(site.redis)[0].state == "finished"
    assert submit_run(site.redis, "bulk", input=str(site.input), output=str(site.output), rows_per_shard=3)
    assert site.work() == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"single_file": "jsonl"},
        {"sampling": {"n": 2}},
        {"output_prefix": "llm_", "keep": ["id"]},
        {"prompts": [{"name": "first", "template": "{prompt} a"}, {"name": "last", "template": "{first} b"}]},
        {"template": "{prompt}", "sampling": {"temperature": 0}, "filename_column": "file"},
    ],
    ids=["single file", "n", "prefix", "several prompts", "template"],
)
def test_runs_of_other_shapes_are_tried_again_too(
    arguments: dict[str, Any], redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    site = Site(redis, make_context, tmp_path, **arguments)
    error = f"{arguments.get('output_prefix', '')}error"
    before = site.parts
    retry_run(redis, site.run)
    site.work(lambda request: FakeCompletion("x", 0, [1], "stop", 1, 0))
    after = site.parts
    assert [row["id"] for row in after if row[error] is not None] == [7]
    assert [row["id"] for row in after] == list(range(ROWS))
    for old, new in zip(before, after, strict=True):
        assert old == new or old[error] is not None
    if "single_file" in arguments:
        lines = [json.loads(line) for line in (site.output / "output.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines if line["error"]] == [7]


def test_a_run_without_errors_stays_as_it_is(
    redis: Redis, make_context: MakeContext, tmp_path: Path, invoke: Invoke
) -> None:
    site = Site(redis, make_context, tmp_path, limit=3)
    retry_run(redis, site.run)
    site.work()
    stat = (site.output / "_SUCCESS").stat()
    retry_run(redis, site.run)
    assert site.work() == []
    assert (site.output / "_SUCCESS").stat() == stat
    assert list_runs(redis)[0].state == "finished"


def test_what_cannot_be_is_refused_by_name_before_the_end_is_taken_back(
    site: Site, redis: Redis, make_context: MakeContext, tmp_path: Path, invoke: Invoke
) -> None:
    def retry(context: JobContext) -> Any:
        function = own_function("jobs.retry_rows")
        assert function is not None
        return function(context, site.run, str(site.output / "_plan.json"))

    other = replace(make_context(), model=replace(make_context().model, fingerprint="another"))
    with pytest.raises(RunOfAnotherModel):
        retry(other)
    moved = site.input.rename(tmp_path / "moved")
    with pytest.raises(InputChanged):
        retry(make_context())
    moved.rename(site.input)
    with pytest.raises(InvalidJob, match="a damaged part"):
        run_task(make_context(), "jobs.score_shard", site.run, "/p", 0, redo_damaged=True, retry_errors=True)
    assert (site.output / "_SUCCESS").is_file()
    assert list_runs(redis)[0].state == "finished"
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}]
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, lines)))
    batch = score_parquet(
        make_context(),
        str(tmp_path / "batch.jsonl"),
        str(tmp_path / "b"),
        input_format="openai-batch",
        prompt_column=None,
    )
    retry_run(redis, batch["run"])
    with pytest.raises(CannotRetry, match=r"errors\.jsonl"):
        site.work()
    assert "knows no run" in invoke("errors", "0" * 16, "--retry").output


def test_a_retry_and_another_planning_do_not_meet(site: Site, invoke: Invoke) -> None:
    again = {"input": str(site.input), "output": str(site.output), "rows_per_shard": 3}
    retry_run(site.redis, site.run)
    for meets in (lambda: retry_run(site.redis, site.run), lambda: submit_run(site.redis, "bulk", **again)):
        with pytest.raises(PlanningUnderWay):
            meets()
    site.work()
    submit_run(site.redis, "bulk", **again)
    with pytest.raises(PlanningUnderWay, match="not tried again with that"):
        retry_run(site.redis, site.run)


def plan_retry(site: Site) -> list[Any]:
    """Have the retry planned; return the shards' jobs."""
    retry_run(site.redis, site.run)
    (planning,) = queued_jobs(site.redis)
    function = own_function(planning.func_name)
    assert function is not None
    function(replace(site.make_context(), job_id=planning.id), **planning.kwargs)
    planning.delete()
    return queued_jobs(site.redis)


def test_a_cancelled_retry_leaves_a_run_that_a_submit_finishes_as_it_is(site: Site, invoke: Invoke) -> None:
    before = site.parts
    plan_retry(site)
    assert not (site.output / "_SUCCESS").exists()
    assert list_runs(site.redis)[0].state == "running"
    invoke("cancel", site.run)
    assert queued_jobs(site.redis) == []
    submit_run(site.redis, "bulk", input=str(site.input), output=str(site.output), rows_per_shard=3)
    assert site.work() == []
    assert (site.output / "_SUCCESS").is_file()
    assert site.parts == before


def test_two_executions_of_a_retry_never_give_an_answer_up_for_an_error(site: Site) -> None:
    first, *others = plan_retry(site)
    slow = opened_task(
        replace(site.make_context(), job_id=first.id), first.func_name, first.args, first.kwargs
    )
    run_task(site.make_context(), first.func_name, *first.args, answer=sound, **first.kwargs)
    answered = site.parts
    feed(slow, lambda request: refuse("too late"))
    slow.result()
    slow.close()
    assert site.parts == answered
    for job in others:
        run_task(site.make_context(), job.func_name, *job.args, answer=sound, **job.kwargs)
    late = opened_task(
        replace(site.make_context(), job_id=first.id), first.func_name, first.args, first.kwargs
    )
    feed(late)
    assert late.result()["run_finished"]
    late.close()
    assert (site.manifest["errors"], failed(site.parts)) == (1, [7])


def test_a_planning_that_has_read_a_part_before_a_retry_answered_it_leaves_the_record_of_that(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = plan_retry(site)
    amend_parts, times = RunState.amend_parts, iter([True])

    def late(state: RunState, found: Any, *rest: Any) -> Any:
        if found and next(times, False):
            run_task(site.make_context(), first.func_name, *first.args, answer=sound, **first.kwargs)
            first.delete()
        return amend_parts(state, found, *rest)

    monkeypatch.setattr(RunState, "amend_parts", late)
    score_parquet(site.make_context(), str(site.input), str(site.output), rows_per_shard=3)
    assert next(times, None) is None
    site.work()
    assert (failed(site.parts), list_runs(site.redis)[0].errors) == ([7], 1)


def test_a_part_that_a_smaller_one_replaces_while_it_is_read_is_no_damaged_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, smaller = site.output / "part-00000.parquet", site.output.parent / "smaller"
    table = pq.read_table(path)
    path.rename(smaller)
    pq.write_table(table.append_column("x", pa.array([str(n) * 999 for n in range(len(table))])), path)
    open_parquet = part.open_parquet

    @contextmanager
    def opened(*args: Any) -> Iterator[Any]:
        with open_parquet(*args) as file:
            if smaller.exists():
                smaller.replace(path)
            yield file

    monkeypatch.setattr(part, "open_parquet", opened)
    stats = part.read_part_stats(Storage([str(site.output.parent)]), str(path), site.run, 0, len(table))
    assert stats.rows == len(table)


def test_a_part_that_is_put_in_place_behind_the_end_is_in_the_manifest(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An execution freezes before its part is there; others end the run meanwhile from what they saw."""
    jobs = plan_retry(site)
    frozen, *others = [
        opened_task(replace(site.make_context(), job_id=job.id), job.func_name, job.args, job.kwargs)
        for job in jobs
    ]
    feed(frozen, sound)
    folder = frozen._folder
    for other in others:
        feed(other, sound)
        other.result()
        other.close()
    folder.state.record_part(folder.part_stats(0))  # as a thawed execution of the first scoring counts it
    assert folder._finish()
    assert site.manifest["errors"] == 2
    assert frozen.result()["run_finished"]
    frozen.close()
    assert site.manifest["errors"] == 1
    assert (site.output / "_SUCCESS").is_file()


def test_who_has_lost_the_job_puts_no_part_in_place(site: Site) -> None:
    first, *_ = plan_retry(site)
    context = replace(site.make_context(), job_id=first.id, lease=Lease("rq:executions:x", "gone"))
    before = site.parts
    task = opened_task(context, first.func_name, first.args, first.kwargs)
    feed(task, sound)
    with pytest.raises(RunBusy):
        task.result()
    task.close()
    assert site.parts == before
    assert not list(site.output.glob("_tmp*"))


def test_a_file_that_was_removed_as_a_leftover_is_written_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = plan_retry(site)
    written: list[str] = []

    def write(storage: Any, path: str, *rest: Any) -> None:
        write_part(storage, path, *rest)
        if not written:
            Path(path).unlink()
        written.append(path)

    write_part = retry_work.write_part
    monkeypatch.setattr(retry_work, "write_part", write)
    run_task(site.make_context(), first.func_name, *first.args, answer=sound, **first.kwargs)
    assert len(written) == 2
    assert failed(site.parts)[:1] == [3]
