"""What is done with each shard of a run does not grow with how many jobs stand on the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.common.keys import run_key, run_parts_key
from jobs.context import JobContext
from jobs.runs.control import _is_nearer_to_end, cancel_run
from jobs.runs.plans.names import shard_job_id
from jobs.runs.redis_state import recorded_parts, shard_jobs, waiting_jobs
from jobs.runs.redis_state.state import RunState
from jobs.runs.watching.snapshot import read_snapshot
from jobs.watch.runs import RunDetail, list_shards, read_run
from tests.jobs.answering import queued_jobs, run_task, score_parquet

QUEUE_KEY = "rq:queue:bulk"
SHARDS = 30


@pytest.fixture
def submit(make_context: Callable[[], JobContext], tmp_path: Path) -> Callable[[], dict[str, Any]]:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [str(number) for number in range(SHARDS)]}), source)
    return lambda: score_parquet(make_context(), str(source), str(tmp_path / "out"), rows_per_shard=1)


def lists_read(redis: Redis) -> int:
    info: Any = redis.info("commandstats")
    return int(info.get("cmdstat_lrange", {"calls": 0})["calls"])


def test_a_run_that_is_submitted_again_reads_its_queue_once(
    redis: Redis, submit: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_jobs, "CHUNK", 3)
    monkeypatch.setattr(waiting_jobs, "PAGE", 20)
    submit()
    before, queued = lists_read(redis), redis.lrange(QUEUE_KEY, 0, -1)
    assert submit()["shards_enqueued"] == 0
    assert lists_read(redis) - before == 1 + 4, (
        "this test's own, and pages of 20, 10, none, and none of RQ's own"
    )
    assert redis.lrange(QUEUE_KEY, 0, -1) == queued


def test_a_shard_that_is_on_no_queue_is_enqueued_again_however_it_came_back(
    redis: Redis, submit: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit()
    lost, moved = redis.lindex(QUEUE_KEY, 5), redis.lindex(QUEUE_KEY, 7)
    redis.lrem(QUEUE_KEY, 1, lost)
    read = waiting_jobs.WaitingJobs.among

    def among(self: waiting_jobs.WaitingJobs, job_ids: Any) -> set[str]:
        return read(self, job_ids) - {moved.decode()}  # as if it came back after the queue was read

    monkeypatch.setattr(waiting_jobs.WaitingJobs, "among", among)
    assert submit()["shards_enqueued"] == 1
    assert sorted(redis.lrange(QUEUE_KEY, 0, -1)).count(moved) == 1
    assert redis.lindex(QUEUE_KEY, -1) == lost


@pytest.mark.parametrize("others_come_first", [True, False])
def test_a_cancel_seeks_its_jobs_from_the_nearer_end(
    redis: Redis, submit: Callable[[], dict[str, Any]], others_come_first: bool
) -> None:
    run = str(submit()["run"])
    others = [f"other {number}" for number in range(2 * SHARDS)]
    redis.lpush(QUEUE_KEY, *others) if others_come_first else redis.rpush(QUEUE_KEY, *others)
    ids = [shard_job_id(run, shard) for shard in range(SHARDS)]
    assert _is_nearer_to_end(redis, QUEUE_KEY, ids) is others_come_first
    assert cancel_run(redis, run).removed == SHARDS
    assert redis.llen(QUEUE_KEY) == len(others)


def counts_of(detail: RunDetail) -> dict[str, Any]:
    """All but what depends on the moment of the look."""
    moving = ("left_s", "rows_per_s", "tokens_per_s")
    return {name: value for name, value in asdict(detail.summary).items() if name not in moving}


def test_a_look_at_a_run_reads_no_more_than_its_last_parts_and_tells_the_same(
    redis: Redis,
    submit: Callable[[], dict[str, Any]],
    make_context: Callable[[], JobContext],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = str(submit()["run"])
    for job in queued_jobs(redis)[:9]:
        run_task(make_context(), job.func_name, *job.args)
    before, detail = read_snapshot(redis, run), counts_of(read_run(redis, run))
    monkeypatch.setattr(recorded_parts, "MAX_LOOKED", 4)
    read: list[list[int]] = []
    parts_of = recorded_parts.RecordedParts.parts_of

    def noted(self: Any, shards: Any) -> Any:
        read.append(list(shards))
        return parts_of(self, shards)

    monkeypatch.setattr(recorded_parts.RecordedParts, "parts_of", noted)
    monkeypatch.setattr(recorded_parts.RecordedParts, "parts", lambda self: pytest.fail("all are read"))
    redis.hset(run_parts_key(run), mapping={"9" * 5000: "x", "-1": "x", "x": "x"})
    after = read_snapshot(redis, run)
    assert read == [[5, 6, 7, 8]]
    assert (before.done, before.rows_done) == (9, 9)
    assert before.tokens == before.counts["generated_tokens"] > 0
    assert replace(after, left_s=None) == replace(before, left_s=None)
    assert counts_of(read_run(redis, run)) == detail
    assert [each.state for each in list_shards(redis, run)] == ["done"] * 9 + ["queued"] * (SHARDS - 9)


@pytest.fixture
def half_done(
    redis: Redis,
    submit: Callable[[], dict[str, Any]],
    make_context: Callable[[], JobContext],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A run with more parts than a look reads."""
    run = str(submit()["run"])
    for job in queued_jobs(redis)[: SHARDS // 2]:
        run_task(make_context(), job.func_name, *job.args)
    monkeypatch.setattr(recorded_parts, "MAX_LOOKED", 4)
    return run


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"total_rows": "x"}, id="no number"),
        pytest.param({"total_errors": None}, id="gone"),
        pytest.param({"total_parts": None}, id="of workers that do not count parts"),
        pytest.param({"total_parts": "4", "total_rows": "4"}, id="of a few parts"),
        pytest.param({"total_parts": "99", "total_rows": "99"}, id="of more parts"),
    ],
)
def test_totals_that_lack_parts_are_not_believed(
    redis: Redis, half_done: str, broken: dict[str, str | None]
) -> None:
    before, detail = read_snapshot(redis, half_done), counts_of(read_run(redis, half_done))
    for field, value in broken.items():
        redis.hset(run_key(half_done), field, value) if value else redis.hdel(run_key(half_done), field)
    after = read_snapshot(redis, half_done)
    assert (after.rows_done, after.done) == (SHARDS // 2, SHARDS // 2)
    assert replace(after, left_s=None) == replace(before, left_s=None)
    assert {**counts_of(read_run(redis, half_done)), "ended_at": None} == {**detail, "ended_at": None}


def test_rows_that_the_totals_have_twice_make_no_more_than_the_run_has(redis: Redis, half_done: str) -> None:
    redis.hset(run_key(half_done), "total_rows", SHARDS + 1)
    assert read_snapshot(redis, half_done).rows_done == SHARDS


def test_the_parts_that_are_looked_at_are_those_before_the_shards_under_way(
    redis: Redis, half_done: str
) -> None:
    """As of a run whose first shards are asked again: its highest ones were done long ago."""
    state = RunState(redis, half_done)
    assert list(state.look().latest) == [11, 12, 13, 14]
    assert sorted(state.look({2, 9}).latest) == [6, 7, 8, 9]
    assert sorted(state.look({2}).latest) == [0, 1, 2, 14]
    assert sorted(state.look({10**9}).latest) == [11, 12, 13, 14]


def test_of_a_resumed_run_the_totals_are_believed_and_parts_before_its_running_shards_looked_at(
    redis: Redis,
    half_done: str,
    submit: Callable[[], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "out" / "part-00007.parquet").unlink()
    submit()
    redis.zadd("rq:wip:bulk", {f"{shard_job_id(half_done, 7)}:abc": 9e12})
    read: list[int] = []
    monkeypatch.setattr(
        recorded_parts.RecordedParts, "parts_of", lambda self, shards: read.extend(shards) or {}
    )
    monkeypatch.setattr(recorded_parts.RecordedParts, "parts", lambda self: pytest.fail("all are read"))
    snapshot = read_snapshot(redis, half_done)
    assert (snapshot.done, snapshot.started, sorted(read)) == (SHARDS // 2 - 1, 1, [3, 4, 5, 6])
