"""What is told of all runs that Redis knows, and of one: without its parts, and whatever others wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.common.keys import RUNS_KEY, run_errors_key, run_key, run_parts_key
from jobs.context import JobContext
from jobs.errors import RunKeyDamaged, UnknownRun
from jobs.runs.redis_state.run_index import list_in_index
from jobs.runs.redis_state.totals import store_totals
from jobs.runs.statistics.reasons import MAX_EXAMPLES, Reasons
from jobs.watch.runs import list_runs, list_shards, read_run
from tests.jobs.answering import fail, queued_jobs, run_task, score_parquet, shout, work_off
from tests.jobs.conftest import Invoke
from tests.jobs.test_report import PART
from tests.jobs.test_verify import drawn

MakeContext = Callable[[], JobContext]


def commands(redis: Redis) -> int:
    found = redis.info("commandstats")
    return sum(each["calls"] for name, each in found.items() if name != "cmdstat_info")


def test_each_run_has_a_line_with_its_state_counts_and_rates(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    done = score_parquet(make_context(), str(source), str(tmp_path / "one"), rows_per_shard=2)["run"]
    work_off(redis, make_context)
    moving = score_parquet(make_context(), str(source), str(tmp_path / "two"), rows_per_shard=1)["run"]
    first, started, failed, *_ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    first.delete()
    redis.lrem("rq:queue:bulk", 1, started.id)
    redis.hset(started.key, mapping={"status": "started", "meta": '{"rows_done": 1, "tokens": 9}'})
    redis.zadd("rq:wip:bulk", {f"{started.id}:abc": 9e12})
    fail(redis, failed, "jobs.errors.InputChanged: it changed")
    waiting = invoke("submit", source, tmp_path / "three").stdout.strip()
    found = {each.run: each for each in list_runs(redis)}
    assert list(found) == [waiting, moving, done]  # the last submission first
    assert [each.state for each in found.values()] == ["planning", "running", "finished"]
    one = found[done]
    assert (one.rows, one.rows_done, one.errors, one.shards, one.shards_done) == (5, 5, 1, 3, 3)
    assert (one.tokens, one.prompt_tokens, one.model) == (4, 4, "m (float32, fingerpr)")
    assert one.began_at is not None
    assert one.ended_at is not None
    assert one.worked_s is not None
    assert 0 < one.worked_s <= one.ended_at - one.began_at
    assert one.rows_per_s == pytest.approx(5 / one.worked_s)
    two = found[moving]
    assert (two.rows_done, two.tokens, two.shards_done, two.shards_started) == (2, 10, 1, 1)
    assert (two.shards_failed, two.shards_queued, two.is_active) == (1, 2, True)
    assert two.tokens_per_s
    assert (found[waiting].rows, found[waiting].rows_per_s) == (None, None)
    assert [each.run for each in list_runs(redis, states=["finished"])] == [done]
    assert [each.run for each in list_runs(redis, limit=1)] == [waiting]
    for each in found.values():
        detail = read_run(redis, each.run).summary
        assert json.loads(json.dumps(detail.to_object())).keys() == each.to_object().keys()
        assert (detail.state, detail.rows_done, detail.tokens) == (each.state, each.rows_done, each.tokens)
    list_in_index(redis, done)  # as planning does when it ends
    again = list_runs(redis)[0]
    assert (again.run, again.submitted_at) == (done, one.submitted_at), "planning is no submission"


def test_a_list_reads_no_part_and_takes_few_commands(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["a"] * 300}), tmp_path / "in.parquet")
    for number in range(3):
        output = str(tmp_path / f"out{number}")
        score_parquet(make_context(), str(tmp_path / "in.parquet"), output, rows_per_shard=1)
    for job in queued_jobs(redis)[:50]:
        run_task(make_context(), job.func_name, *job.args)
    before, whole = commands(redis), redis.info("commandstats")["cmdstat_hgetall"]["calls"]
    found = list_runs(redis)
    assert sum(each.shards_done for each in found) == sum(each.rows_done for each in found) == 50
    assert commands(redis) - before < 25
    assert redis.info("commandstats")["cmdstat_hgetall"]["calls"] == whole


def test_errors_are_told_by_reason_with_row_numbers(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    prompts = [None, "broken 1", "a", "broken 22", None, "b", "broken 333", "broken 4", "c"]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    run = score_parquet(
        make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=2
    )["run"]
    work_off(redis, make_context, answer=drawn)
    found = [(each.text, each.rows, each.examples) for each in read_run(redis, run).reasons]
    assert found == [("it is broken", 4, [1, 3, 6]), ("prompt is null", 2, [0, 4])]
    redis.delete(run_key(run), run_parts_key(run), run_errors_key(run))
    score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=2)
    assert [(each.text, each.rows) for each in read_run(redis, run).reasons] == [
        ("it is broken", 4),
        ("prompt is null", 2),
    ]
    assert (list_runs(redis)[0].errors, list_runs(redis)[0].rows_done) == (6, 9)


def test_reasons_that_differ_in_numbers_alone_are_one_and_their_kinds_are_bounded() -> None:
    reasons = Reasons()
    for row in range(5000):
        reasons.add(f"prompt has {row} tokens" if row % 2 else chr(0x4E00 + row), [row])
    first, *rest = reasons.commonest(2000)
    assert (first.text, first.rows, first.examples) == ("prompt has 1 tokens", 2500, [1, 3, 5][:MAX_EXAMPLES])
    assert len(rest) == 1000
    assert reasons.rows == 5000


def test_shards_are_told_one_by_one(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)["run"]
    *_, failed, last = queued_jobs(redis)
    run_task(make_context(), last.func_name, *last.args)
    fail(redis, failed, "ValueError")
    redis.hset(failed.key, "worker_name", "w\x1b[2J")
    shards = list_shards(redis, run, 2)
    assert [(each.shard, each.state) for each in shards] == [(2, "queued"), (3, "failed"), (4, "done")]
    assert (shards[-1].rows, shards[-1].errors, shards[1].worker) == (1, 1, r"w\x1b[2J")


def test_the_rates_of_a_finished_run_are_those_of_all_its_submissions_without_the_time_between(
    redis: Redis,
) -> None:
    run, first = "3" * 16, PART
    later = replace(first, shard=1, generated_tokens=0, started_at=1000.0, ended_at=1010.0)
    facts = {"output": "/out", "queue": "bulk", "rows": 20, "shards": 2, "finished": 1}
    extension = {"judged_rows": 10, "judged_tokens": 0, "began_at": 1000, "ended_at": 1010}
    redis.hset(run_key(run), mapping={**facts, **extension})
    store_totals(redis, run_key(run), [later, first])
    list_in_index(redis, run)
    for found in (list_runs(redis)[0], read_run(redis, run).summary):
        assert (found.worked_s, found.rows_per_s, found.tokens_per_s) == (20.0, 1.0, 2.0)


def test_of_a_cancelled_run_no_shard_has_failed_and_the_rest_is_left(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)["run"]
    first, stopped, *_ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    fail(redis, stopped, "jobs.errors.RunCancelled")  # as RQ keeps what is stopped
    assert invoke("cancel", run).exit_code == 0
    for found in (list_runs(redis)[0], read_run(redis, run).summary):
        assert (found.state, found.shards_done, found.shards_failed) == ("cancelled", 1, 0)
        assert (found.shards_queued, found.shards_left) == (0, 4)
    assert [each.state for each in list_shards(redis, run)] == ["done", *["left"] * 4]


def test_what_others_write_into_the_keys_harms_no_list(
    invoke: Invoke, redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)["run"]
    gone, damaged = "1" * 16, "2" * 16
    redis.zadd(RUNS_KEY, {"no run\n": 9e15, b"\xff": 8e15, gone: 7e15, damaged: 6e15})
    redis.set(run_key(damaged), "no hash")
    hostile = {"total_rows": "x", "began_at": "nan", "rows": "1e9", "model_text": "\x1b[2J", "output": "a\nb"}
    redis.hset(run_key(run), mapping=hostile)
    redis.hset(
        run_errors_key(run), mapping={"0": "[" * 5000, "1": '{"reasons": [[1, 2, 3], ["r", 2, ["x"]]]}'}
    )
    first, second = list_runs(redis)
    assert (first.run, first.state) == (damaged, "damaged")
    assert (second.run, second.rows, second.rows_done) == (run, None, 0)
    assert (second.output, second.model) == (r"a\nb", r"\x1b[2J")
    assert [(each.text, each.examples) for each in read_run(redis, run).reasons] == [("r", [])]
    with pytest.raises(UnknownRun):
        read_run(redis, gone)
    redis.set(RUNS_KEY, "no sorted set")
    with pytest.raises(RunKeyDamaged, match="index is a string"):
        list_runs(redis)
    again = invoke("submit", source, tmp_path / "other").stdout.strip()  # begins a new index
    assert [each.run for each in list_runs(redis)] == [again]
    redis.delete(RUNS_KEY)
    list_in_index(redis, run)
    assert redis.ttl(RUNS_KEY) > 0


def test_totals_that_somebody_broke_are_counted_anew_at_the_end(
    redis: Redis, make_context: MakeContext, source: Path, tmp_path: Path
) -> None:
    run = score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=2)["run"]
    redis.hset(run_key(run), mapping={"total_rows": "x", "total_errors": "900"})
    work_off(redis, make_context, answer=shout)
    (found,) = list_runs(redis)
    assert (found.rows_done, found.errors, found.state) == (5, 1, "finished")
