"""A run from its Parquet input to its Parquet output, without faults."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from jobs.context import JobContext
from jobs.parquet.prompt_source import RowProblem
from jobs.parquet.shard_requests import ShardRequests
from jobs.parquet.shard_work import row_seed
from jobs.runs.plans.names import part_name, shard_job_id
from jobs.tasks import Request
from tests.jobs.answering import (
    FakeCompletion,
    opened_task,
    queued_jobs,
    run_task,
    score_parquet,
    shout,
    work_off,
)
from tests.jobs.input_files import read_rows, write_prompts

ENDED = {"_plan.json", "_manifest.json", "_report.html", "_SUCCESS"}
MakeContext = Callable[[], JobContext]
GREEDY = {"temperature": 0}


def test_every_row_comes_back_once_in_order(redis: Redis, make_context: MakeContext, tmp_path: Path) -> None:
    prompts = [f"prompt {number % 5}" for number in range(50)]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    plan = score_parquet(make_context(), source, str(tmp_path / "out"), sampling=GREEDY, rows_per_shard=7)
    assert (plan["rows"], plan["shards"], plan["shards_enqueued"], plan["run_finished"]) == (50, 8, 8, False)
    results = work_off(redis, make_context)
    assert [result["run_finished"] for result in results] == [False] * 7 + [True]
    rows = read_rows(tmp_path / "out")
    assert [row["id"] for row in rows] == list(range(50))
    assert [row["completion"] for row in rows] == [prompt.upper() for prompt in prompts]
    assert [row["prompt_tokens"] for row in rows] == [len(prompt) for prompt in prompts]
    assert all(row["error"] is None and row["finish_reason"] == "stop" for row in rows)
    assert (tmp_path / "out" / "_SUCCESS").read_bytes() == b""
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert (manifest["rows"], manifest["errors"], manifest["model"]) == (50, 0, "m")
    assert manifest["sampling"] == GREEDY
    assert manifest["completion_tokens"] == sum(map(len, prompts))
    assert manifest["generated_tokens"] < manifest["completion_tokens"]
    assert [part["rows"] for part in manifest["parts"]] == [7] * 7 + [1]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {part_name(n) for n in range(8)} | ENDED


def test_a_planning_that_is_interrupted_ends_between_two_files_or_two_chunks(
    redis: Redis, context: JobContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Exception):
        pass

    for number in range(3):
        write_prompts(tmp_path / f"{number}.parquet", ["a", "b"])
    monkeypatch.setattr("jobs.runs.redis_state.shard_jobs.CHUNK", 1)
    for checks in itertools.count():
        countdown = iter(range(checks))

        def check(countdown: Iterator[int] = countdown) -> None:
            if next(countdown, None) is None:
                raise Interrupted

        asked = replace(context, check_interrupted=check)
        try:
            score_parquet(asked, str(tmp_path / "*.parquet"), str(tmp_path / "out"), rows_per_shard=1)
        except Interrupted:
            assert len(queued_jobs(redis)) < 6
        else:
            break
    assert checks >= 2 + 6, "it did not ask before each of two more files, and each of six shards"
    assert len(queued_jobs(redis)) == 6


def test_a_shard_of_several_batches_keeps_each_answer_at_its_row(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    prompts = [f"prompt {number * 7919 % 3000}" for number in range(3000)]
    source = write_prompts(tmp_path / "in.parquet", prompts, row_group_size=1300)
    score_parquet(make_context(), source, str(tmp_path / "out"), rows_per_shard=2900)
    work_off(redis, make_context)
    rows = read_rows(tmp_path / "out")
    assert [row["id"] for row in rows] == list(range(3000))
    assert [row["completion"] for row in rows] == [prompt.upper() for prompt in prompts]


def test_shard_jobs_carry_ids_and_paths_and_no_prompt(
    redis: Redis, context: JobContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["secret"] * 3)
    run = score_parquet(context, source, str(tmp_path / "out"), rows_per_shard=2)["run"]
    first, second = queued_jobs(redis)
    assert (first.id, second.id) == (shard_job_id(run, 0), shard_job_id(run, 1))
    assert first.func_name == "jobs.score_shard"
    assert first.args == [run, str(tmp_path / "out" / "_plan.json"), 0]
    assert first.timeout == -1
    assert "secret" not in str(redis.hgetall(first.key))


def test_planning_again_enqueues_each_shard_once(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"] * 10)
    for _ in range(3):
        score_parquet(make_context(), source, str(tmp_path / "out"), rows_per_shard=3)
    assert len(queued_jobs(redis)) == 4


@pytest.mark.parametrize("status", ["failed", "finished", "stopped", "canceled", "queued", None])
def test_a_shard_without_part_and_live_job_is_enqueued_anew(
    redis: Redis, make_context: MakeContext, tmp_path: Path, status: str | None
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"] * 4)
    run = score_parquet(make_context(), source, str(tmp_path / "out"), rows_per_shard=2)["run"]
    job_id = shard_job_id(run, 1)
    redis.lrem("rq:queue:bulk", 1, job_id)  # also for "queued": lost between a queue and its killed worker
    if status is None:
        redis.delete(Job.key_for(job_id))
    else:
        redis.hset(Job.key_for(job_id), "status", status)
    assert (
        score_parquet(make_context(), source, str(tmp_path / "out"), rows_per_shard=2)["shards_enqueued"] == 1
    )
    assert sorted(job.id for job in queued_jobs(redis)) == [shard_job_id(run, 0), job_id]
    assert Job.fetch(job_id, redis, JSONSerializer).get_status() == "queued"


def test_a_running_shard_is_not_enqueued_again(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    run = score_parquet(make_context(), source, str(tmp_path / "out"))["run"]
    redis.delete("rq:queue:bulk")
    redis.hset(Job.key_for(shard_job_id(run, 0)), "status", "started")
    assert score_parquet(make_context(), source, str(tmp_path / "out"))["shards_enqueued"] == 0


def test_a_shard_that_a_worker_holds_is_not_enqueued_again(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    """Until its first row is scheduled there it still says "queued", and is on no queue."""
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    run = score_parquet(make_context(), source, str(tmp_path / "out"))["run"]
    redis.delete("rq:queue:bulk")
    redis.zadd(f"rq:executions:{shard_job_id(run, 0)}", {"an execution": 9e9})
    assert score_parquet(make_context(), source, str(tmp_path / "out"))["shards_enqueued"] == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_resume_enqueues_exactly_the_shards_without_part(
    redis: Redis, make_context: MakeContext, tmp_path: Path, data: st.DataObject
) -> None:
    redis.flushall()
    folder = tmp_path / str(next(_numbers))
    folder.mkdir()
    rows = data.draw(st.integers(1, 40), "rows")
    rows_per_shard = data.draw(st.integers(1, 12), "rows per shard")
    source = write_prompts(folder / "in.parquet", ["p"] * rows, data.draw(st.integers(1, 12), "row group"))
    arguments = (source, str(folder / "out"))
    score_parquet(make_context(), *arguments, rows_per_shard=rows_per_shard)
    jobs = queued_jobs(redis)
    finished = data.draw(st.sets(st.sampled_from(range(len(jobs)))), "finished")
    for number in finished:
        run_task(make_context(), jobs[number].func_name, *jobs[number].args)
    redis.flushall()  # the parts alone must be enough
    score_parquet(make_context(), *arguments, rows_per_shard=rows_per_shard)
    rest = [job.args[2] for job in queued_jobs(redis)]
    assert rest == [number for number in range(len(jobs)) if number not in finished]
    work_off(redis, make_context)
    assert [row["id"] for row in read_rows(folder / "out")] == list(range(rows))
    assert (folder / "out" / "_SUCCESS").exists()


_numbers = itertools.count()


@given(
    rows=st.lists(st.one_of(st.text("ab", max_size=3), st.none()), max_size=30),
    temperature=st.sampled_from([0, 0.0, 0.7, None]),
    shuffle=st.randoms(use_true_random=False),
)
def test_answers_come_back_in_row_order_whatever_order_they_arrive_in(
    rows: list[str | None], temperature: float | None, shuffle: Any
) -> None:
    sampling = {} if temperature is None else {"temperature": temperature}
    texts = [RowProblem("null") if row is None else row for row in rows]
    shard = ShardRequests(texts, sampling, lambda row: 1000 + row, is_chat=False)
    requests = list(enumerate(shard.requests()))
    prompts = [request.prompt for _, request in requests]
    assert prompts == sorted(prompts)
    shuffle.shuffle(requests)
    for index, request in requests:
        assert isinstance(request.prompt, str)
        shard.deliver(index, [FakeCompletion(f"<{request.prompt}>", token_ids=[1])])
    assert shard.rows_done == len(rows)
    answers = shard.answers()
    assert [answer.completion for answer in answers] == [row if row is None else f"<{row}>" for row in rows]
    valid = [row for row in rows if row is not None]
    if temperature == 0:
        assert len(requests) == len(set(valid)) == shard.generated_tokens
        assert all("seed" not in request.sampling for _, request in requests)
    else:
        seeds = [request.sampling["seed"] for _, request in requests]
        assert sorted(seeds) == [1000 + row for row, text in enumerate(rows) if text is not None]


def test_a_drawn_rows_seed_depends_on_run_and_row_alone(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"] * 6)
    seeds: dict[str, list[int]] = {}
    for output, rows_per_shard in (("one", 6), ("two", 4)):
        seen: list[int] = []

        def note(request: Request, seen: list[int] = seen) -> FakeCompletion:
            seen.append(request.sampling["seed"])
            return shout(request)

        sampling = {"temperature": 1.0, "seed": 5}
        score_parquet(
            make_context(), source, str(tmp_path / output), sampling=sampling, rows_per_shard=rows_per_shard
        )
        work_off(redis, make_context, answer=note)
        seeds[output] = sorted(seen)
    assert seeds["one"] == seeds["two"] == sorted(row_seed(5, row) for row in range(6))
    assert len(set(seeds["one"])) == 6
    assert all(0 <= seed < 2**63 for seed in seeds["one"])


def test_a_runs_own_seed_is_drawn_once_and_kept(make_context: MakeContext, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    plans = []
    for _ in range(2):
        score_parquet(make_context(), source, str(tmp_path / "out"), sampling={"temperature": 1})
        plans.append(json.loads((tmp_path / "out" / "_plan.json").read_text())["seed"])
    assert plans[0] == plans[1]


def test_several_files_keep_their_order_and_global_row_numbers(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    for name, first in (("b", 0), ("a", 100)):
        table = pa.table({"prompt": ["p"] * 5, "id": range(first, first + 5)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    arguments = [str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet")]
    score_parquet(make_context(), arguments, str(tmp_path / "out"), rows_per_shard=3)
    work_off(redis, make_context)
    assert [row["id"] for row in read_rows(tmp_path / "out")] == [*range(5), *range(100, 105)]


def test_a_folder_and_a_glob_name_the_same_files_and_never_the_output(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.parquet", "b.parquet", "_hidden.parquet", "note.txt"):
        write_prompts(folder / name, ["p"])
    (folder / "_hidden.parquet").unlink()
    output = folder / "out"
    for source in (f"{folder}/**/*.parquet", str(folder)):
        for _ in range(2):
            plan = score_parquet(make_context(), source, str(output))
            work_off(redis, make_context)
        assert plan["rows"] == 2
        assert plan["run_finished"]
        for path in output.iterdir():
            path.unlink()


def test_a_run_without_rows_ends_at_once_with_a_typed_part(
    redis: Redis, context: JobContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", [])
    plan = score_parquet(context, source, str(tmp_path / "out"))
    assert plan["run_finished"]
    assert queued_jobs(redis) == []
    table = pq.read_table(tmp_path / "out")
    assert table.num_rows == 0
    assert table.schema.field("completion").type == pa.string()
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_parts_have_one_schema_also_where_all_is_null(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.parquet", [None, None, "a", "b"])
    score_parquet(make_context(), source, str(tmp_path / "out"), rows_per_shard=2)
    work_off(redis, make_context)
    first, second = (pq.read_schema(tmp_path / "out" / part_name(number)) for number in range(2))
    assert first.equals(second)
    assert first.names[2:] == [
        "completion",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "error",
    ]
    assert first.field("error").type == pa.string()


def test_a_shard_shows_its_progress(make_context: MakeContext, redis: Redis, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "bb", None])
    score_parquet(make_context(), source, str(tmp_path / "out"))
    (job,) = queued_jobs(redis)
    task = opened_task(make_context(), job.func_name, job.args)
    opened_at = task.progress()["opened_at"]
    assert task.progress() == {
        "opened_at": opened_at,
        "rows": 3,
        "rows_done": 1,
        "rows_open": 0,
        "prompt_tokens": 0,
        "tokens": 0,
    }
    requests = list(task.requests())
    task.deliver(1, [shout(requests[1])])
    assert task.progress() == {
        "opened_at": opened_at,
        "rows": 3,
        "rows_done": 2,
        "rows_open": 1,
        "prompt_tokens": 2,
        "tokens": 2,
    }
    task.close()
    task.close()
