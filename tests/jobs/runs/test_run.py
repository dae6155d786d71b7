"""A run from its Parquet input to its Parquet output, without faults."""

import itertools
import json
from collections.abc import Iterator
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
from jobs.errors import JobsError
from jobs.parquet.asks.ask import row_seed
from jobs.parquet.tables.columns import RowProblem
from jobs.runs.plans.names import part_name, shard_job_id
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, opened_task, score_parquet, shard_of, shout
from tests.jobs.local_runs import Runs

ENDED = {"_keys", "_plan.json", "_manifest.json", "_report.html", "_SUCCESS"}
GREEDY = {"temperature": 0}


def test_every_row_comes_back_once_in_order(runs: Runs) -> None:
    prompts = [f"prompt {number % 5}" for number in range(50)]
    plan = runs.plan(runs.write(prompts), sampling=GREEDY, rows_per_shard=7)
    assert (plan["rows"], plan["shards"], plan["shards_enqueued"], plan["run_finished"]) == (
        50,
        8,
        8,
        False,
    )
    results = runs.work()
    assert [result["run_finished"] for result in results] == [False] * 7 + [True]
    rows = runs.rows()
    assert [row["id"] for row in rows] == list(range(50))
    assert [row["completion"] for row in rows] == [prompt.upper() for prompt in prompts]
    assert [row["prompt_tokens"] for row in rows] == [len(prompt) for prompt in prompts]
    assert all(row["error"] is None and row["finish_reason"] == "stop" for row in rows)
    assert (runs.output / "_SUCCESS").read_bytes() == b""
    manifest = runs.manifest
    assert (manifest["rows"], manifest["errors"], manifest["model"]) == (50, 0, "m")
    assert manifest["sampling"] == GREEDY
    assert manifest["completion_tokens"] == sum(map(len, prompts)) > manifest["generated_tokens"]
    assert [part["rows"] for part in manifest["parts"]] == [7] * 7 + [1]
    names = {path.name for path in runs.output.iterdir()}
    assert names == {part_name(n) for n in range(8)} | ENDED


def test_a_planning_that_is_interrupted_ends_between_two_files_or_two_chunks(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Exception):
        pass

    for number in range(3):
        runs.write(["a", "b"]).rename(tmp_path / f"{number}.parquet")
    monkeypatch.setattr("jobs.runs.redis_state.shard_jobs.CHUNK", 1)
    for checks in itertools.count():
        countdown = iter(range(checks))

        def check(countdown: Iterator[int] = countdown) -> None:
            if next(countdown, None) is None:
                raise Interrupted

        asked = replace(runs.context(), check_interrupted=check)
        try:
            score_parquet(asked, str(tmp_path / "*.parquet"), str(runs.output), rows_per_shard=1)
        except Interrupted:
            assert len(runs.jobs) < 6
        else:
            break
    assert checks >= 2 + 6, "it did not ask before each of two more files, and each of six shards"
    assert len(runs.jobs) == 6


def test_a_shard_of_several_batches_keeps_each_answer_at_its_row(runs: Runs) -> None:
    prompts = [f"prompt {number * 7919 % 3000}" for number in range(3000)]
    table = runs.score(runs.write(prompts, row_group_size=1300), rows_per_shard=2900)
    assert table["id"].to_pylist() == list(range(3000))
    assert table["completion"].to_pylist() == [prompt.upper() for prompt in prompts]


def test_shard_jobs_carry_ids_and_paths_and_no_prompt(redis: Redis, runs: Runs) -> None:
    run = runs.plan(runs.write(["secret"] * 3), rows_per_shard=2)["run"]
    first, second = runs.jobs
    assert (first.id, second.id) == (shard_job_id(run, 0), shard_job_id(run, 1))
    assert first.func_name == "jobs.score_shard"
    assert first.args == [run, str(runs.output / "_plan.json"), 0]
    assert first.timeout == -1
    assert "secret" not in str(redis.hgetall(first.key))


@pytest.mark.parametrize("status", ["failed", "stopped", "queued", None])
def test_a_shard_without_part_and_live_job_is_enqueued_anew_and_others_are_not(
    runs: Runs, redis: Redis, status: str | None
) -> None:
    runs.write(["a"] * 4)
    run = runs.plan(rows_per_shard=2)["run"]
    job_id = shard_job_id(run, 1)
    redis.lrem(
        "rq:queue:bulk", 1, job_id
    )  # also for "queued": lost between a queue and its killed worker
    if status is None:
        redis.delete(Job.key_for(job_id))
    else:
        redis.hset(Job.key_for(job_id), "status", status)
    assert runs.plan(rows_per_shard=2)["shards_enqueued"] == 1
    assert sorted(job.id for job in runs.jobs) == [shard_job_id(run, 0), job_id]
    assert Job.fetch(job_id, redis, JSONSerializer).get_status() == "queued"


@pytest.mark.parametrize("is_held", [False, True])
def test_a_shard_that_runs_or_that_a_worker_holds_is_not_enqueued_again(
    runs: Runs, redis: Redis, is_held: bool
) -> None:
    """Until its first row is scheduled there it still says "queued", and is on no queue."""
    run = runs.plan(runs.write(["a"]))["run"]
    redis.delete("rq:queue:bulk")
    if is_held:
        redis.zadd(f"rq:executions:{shard_job_id(run, 0)}", {"an execution": 9e9})
    else:
        redis.hset(Job.key_for(shard_job_id(run, 0)), "status", "started")
    assert runs.plan()["shards_enqueued"] == 0


_outputs = itertools.count()


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 12),
    group=st.integers(1, 12),
    finished=st.sets(st.integers(0, 9)),
)
def test_resume_enqueues_exactly_the_shards_without_part(
    runs: Runs, redis: Redis, tmp_path: Path, rows: int, size: int, group: int, finished: set[int]
) -> None:
    redis.flushall()
    runs.write(["p"] * rows, row_group_size=group)
    output = tmp_path / str(next(_outputs))
    runs.plan(output=output, rows_per_shard=size)
    jobs = runs.jobs
    for number in finished & {*range(len(jobs))}:
        runs.run(jobs[number])
    redis.flushall()  # the parts alone must be enough
    runs.plan(output=output, rows_per_shard=size)
    assert [job.args[2] for job in runs.jobs] == [n for n in range(len(jobs)) if n not in finished]
    runs.work()
    assert pq.read_table(output)["id"].to_pylist() == list(range(rows))
    assert (output / "_SUCCESS").exists()


@given(
    rows=st.lists(st.one_of(st.text("ab", max_size=3), st.none()), max_size=30),
    temperature=st.sampled_from([0, 0.7, None]),
    shuffle=st.randoms(use_true_random=False),
)
def test_answers_come_back_in_row_order_whatever_order_they_arrive_in(
    rows: list[str | None], temperature: float | None, shuffle: Any
) -> None:
    sampling = {} if temperature is None else {"temperature": temperature}
    texts = [RowProblem("null") if row is None else row for row in rows]
    shard = shard_of(texts, sampling)
    requests = list(enumerate(shard.requests()))
    prompts = [request.prompt for _, request in requests]
    assert prompts == sorted(prompts)
    shuffle.shuffle(requests)
    for index, request in requests:
        shard.deliver(index, [FakeCompletion(f"<{request.prompt}>", token_ids=[1])])
    assert shard.counts.done == len(rows)
    answers = shard.answers()
    assert [answer.completion for answer in answers] == [
        row if row is None else f"<{row}>" for row in rows
    ]
    valid = [row for row in rows if row is not None]
    if temperature == 0:
        assert len(requests) == len(set(valid)) == shard.counts.generated_tokens
        assert all("seed" not in request.sampling for _, request in requests)
    else:
        seeds = [request.sampling["seed"] for _, request in requests]
        assert sorted(seeds) == sorted(
            row_seed(0, 1000 + row) for row, text in enumerate(rows) if text is not None
        )


def test_a_drawn_rows_seed_depends_on_run_and_row_alone(runs: Runs, tmp_path: Path) -> None:
    runs.write(["a"] * 6)
    seeds: list[list[int]] = []

    def note(request: Request) -> FakeCompletion:
        seeds[-1].append(request.sampling["seed"])
        return shout(request)

    for size in (6, 4):
        seeds.append([])
        sampling = {"temperature": 1.0, "seed": 5}
        runs.plan(output=tmp_path / str(size), sampling=sampling, rows_per_shard=size)
        runs.work(answer=note)
    assert sorted(seeds[0]) == sorted(seeds[1]) == sorted(row_seed(5, row) for row in range(6))
    assert len(set(seeds[0])) == 6
    assert all(0 <= seed < 2**63 for seed in seeds[0])


def test_a_runs_own_seed_is_drawn_once_and_kept(runs: Runs) -> None:
    runs.write(["a"])
    plans = []
    for _ in range(2):
        runs.plan(sampling={"temperature": 1})
        plans.append(json.loads((runs.output / "_plan.json").read_text())["seed"])
    assert plans[0] == plans[1]


def test_several_files_keep_their_order_and_global_row_numbers(runs: Runs, tmp_path: Path) -> None:
    for name, first in (("b", 0), ("a", 100)):
        table = pa.table({"prompt": ["p"] * 5, "id": range(first, first + 5)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    table = runs.score([str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet")], rows_per_shard=3)
    assert table["id"].to_pylist() == [*range(5), *range(100, 105)]


def test_a_run_without_rows_has_one_typed_part(runs: Runs) -> None:
    table = runs.score(runs.write([]), answer=pytest.fail)
    assert (table.num_rows, table.schema.field("completion").type) == (0, pa.string())
    assert (runs.output / "_SUCCESS").exists()


def test_parts_have_one_schema_also_where_all_is_null(runs: Runs) -> None:
    runs.score(runs.write([None, None, "a", "b"]), rows_per_shard=2)
    first, second = (pq.read_schema(runs.output / part_name(number)) for number in range(2))
    assert first.equals(second)
    tokens = ["prompt_tokens", "completion_tokens", "cached_tokens"]
    assert first.names[2:] == ["completion", "finish_reason", *tokens, "error"]
    assert first.field("error").type == pa.string()


def test_a_shard_shows_its_progress(runs: Runs, context: JobContext) -> None:
    runs.plan(runs.write(["a", "bb", None]))
    (job,) = runs.jobs
    task = opened_task(context, job.func_name, job.args)
    begun = {"rows": 3, "rows_done": 1, "rows_open": 0, "prompt_tokens": 0, "tokens": 0}
    assert begun.items() <= task.progress().items()
    requests = list(task.requests())
    task.deliver(1, [shout(requests[1])])
    later = {"rows": 3, "rows_done": 2, "rows_open": 1, "prompt_tokens": 2, "tokens": 2}
    assert later.items() <= task.progress().items()
    for _ in range(2):
        task.close()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"run": "../x"}, "run is '../x'"),
        ({"plan": 3}, "plan is 3, expected the path of the run's plan"),
        ({"shard": 0.0}, "none numbered 0.0"),
    ],
    ids=str,
)
def test_a_shard_that_is_none_of_the_plan_fails_by_name(
    runs: Runs, changed: dict[str, Any], told: str
) -> None:
    named = {
        "run": runs.plan(runs.write(["a"]))["run"],
        "plan": str(runs.output / "_plan.json"),
        "shard": 0,
    }
    with pytest.raises(JobsError, match=told):
        opened_task(runs.context(), "jobs.score_shard", (), {**named, **changed})
