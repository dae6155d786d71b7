"""What is done with each shard of a run does not grow with how many jobs stand on the queue."""

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from jobs.common.keys import run_key
from jobs.runs.control import _is_nearer_to_end, cancel_run
from jobs.runs.plans.names import shard_job_id
from jobs.runs.redis_state import shard_jobs
from jobs.runs.redis_state.state import TOTALS, RunState
from jobs.runs.watching import run_reader
from jobs.runs.watching.reading import list_runs, read_snapshot
from tests.jobs.local_runs import Runs
from tokenmill.dashboard.seen.shards_seen import list_shards

QUEUE_KEY = "rq:queue:bulk"
SHARDS = 30


@pytest.fixture
def submit(runs: Runs) -> Callable[[], dict[str, Any]]:
    runs.write([str(number) for number in range(SHARDS)])
    return lambda: runs.plan(rows_per_shard=1)


def lists_read(redis: Redis) -> int:
    info: Any = redis.info("commandstats")
    return int(info.get("cmdstat_lrange", {"calls": 0})["calls"])


def test_a_run_that_is_submitted_again_reads_its_queue_once(
    redis: Redis, submit: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_jobs, "CHUNK", 3)
    monkeypatch.setattr(shard_jobs, "PAGE", 20)
    submit()
    before, queued = lists_read(redis), redis.lrange(QUEUE_KEY, 0, -1)
    assert submit()["shards_enqueued"] == 0
    assert lists_read(redis) - before == 1 + 4, "this test's own, and pages of 20, 10 and none"
    assert redis.lrange(QUEUE_KEY, 0, -1) == queued


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


def test_a_look_at_a_run_reads_no_more_than_its_last_parts(
    runs: Runs, redis: Redis, submit: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(submit()["run"])
    for job in runs.jobs[:9]:
        runs.run(job)
    monkeypatch.setattr(run_reader, "MAX_LATEST_PARTS", 4)
    # As if a worker were busy: the time left is estimated then.
    monkeypatch.setattr(run_reader.RunReader, "lacks_workers", False)
    read, parts_of = list[list[int]](), RunState.parts_of
    monkeypatch.setattr(
        RunState, "parts_of", lambda self, shards: read.append([*shards]) or parts_of(self, shards)
    )
    found = read_snapshot(redis, run)
    assert read == [[5, 6, 7, 8]]
    assert (found.shards_done, found.rows_done) == (9, 9)
    assert [each.state for each in list_shards(redis, run)] == ["done"] * 9 + ["queued"] * (
        SHARDS - 9
    )


@pytest.mark.parametrize("lost", [(), ("",), ("parts",), ("", "parts")])
def test_a_finished_run_is_counted_right_whatever_redis_lost_meanwhile(
    runs: Runs, redis: Redis, submit: Callable[[], dict[str, Any]], lost: tuple[str, ...]
) -> None:
    run = str(submit()["run"])
    for number, job in enumerate(runs.jobs):
        if number == SHARDS // 2:
            redis.delete(*[run_key(run, kind) for kind in lost] or ["none"])
        runs.run(job)
    assert submit()["already_finished"]
    for found in (read_snapshot(redis, run), *list_runs(redis)):
        assert (found.shards_done, found.rows_done, found.tokens) == (
            SHARDS,
            SHARDS,
            runs.manifest["generated_tokens"],
        )
        assert (found.worked_s or 0) > 0


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("then", ["a part ends", "it is submitted again"])
def test_a_run_is_counted_again_where_its_totals_are_lost_or_no_numbers(
    runs: Runs, redis: Redis, submit: Callable[[], dict[str, Any]], is_lost: bool, then: str
) -> None:
    run = str(submit()["run"])
    first, second, third, *_ = runs.jobs
    runs.run(first)
    runs.run(second)
    redis.hset(run_key(run), mapping=dict.fromkeys(TOTALS, "odd"))
    if is_lost:
        redis.delete(run_key(run))
    if then == "a part ends":
        runs.run(third)
    if then == "it is submitted again" or not is_lost:
        submit()
    done = 3 if then == "a part ends" else 2
    for found in (read_snapshot(redis, run), *list_runs(redis)):
        assert (found.shards_done, found.rows_done) == (done, done)
