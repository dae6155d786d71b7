"""Jobs' fields that hold something else: they are passed over."""

import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Callable

import pytest
from redis import Redis

from jobs.cli import waiting
from jobs.common.keys import run_key
from jobs.runs.plans.names import shard_job_id
from jobs.runs.redis_state.state import RunState
from tests.jobs.answering import refuse
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs

ODD = b"\xff\xfe\x1b[2J"
SHARDS = 4


@pytest.fixture
def submit(runs: Runs, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Submit a run, wait for no worker, and return what that printed."""
    monkeypatch.setattr(waiting, "PLAN_WAIT_S", 0.0)
    runs.write([*"abcd"])
    return lambda: str(invoke("submit", runs.source, runs.output, "--rows-per-shard", 1).output)


@pytest.fixture
def run(runs: Runs, submit: Callable[[], str]) -> str:
    """A run that has been planned."""
    told = submit().splitlines()[0]
    runs.work()
    return told


def spoil_workers(redis: Redis, run: str) -> None:
    redis.lpush("rq:queue:bulk", ODD)
    for name in (ODD, b"text", b"list"):
        redis.sadd("rq:workers:bulk", b"rq:worker:" + name)
        redis.hset(b"rq:worker:" + name, mapping={"queues": ODD, "state": ODD})
    redis.set("tokenmill:worker:text", ODD)
    redis.set("tokenmill:worker:list", '{"models": [["m"], 3]}')


def spoil_jobs(redis: Redis, run: str) -> None:
    for shard, meta in enumerate(["junk", "[1]", '{"rows_done": "x", "tokens": 1e400}', "9" * 5000]):
        redis.hset(f"rq:job:{run}-{shard}", mapping={"meta": meta, "status": ODD, "origin": ODD})
        redis.zadd("rq:wip:bulk", {f"{run}-{shard}:execution": 1e12})


@pytest.mark.parametrize("spoil", [spoil_workers, spoil_jobs])
def test_an_entry_that_cannot_be_read_is_passed_over(
    redis: Redis, invoke: Invoke, submit: Callable[[], str], run: str, spoil: Callable[[Redis, str], None]
) -> None:
    spoil(redis, run)
    for command in (("status", run), ("info",), ("cancel", run)):
        told = invoke(*command)
        assert told.exit_code == 0, told.output
        assert all(line.isprintable() for line in told.output.splitlines())
    assert submit().splitlines()[0] == run


def test_what_unpacks_to_far_more_than_it_has_stays_packed_and_keeps_no_run_from_going_on(
    redis: Redis, runs: Runs, invoke: Invoke, submit: Callable[[], str]
) -> None:
    bomb = zlib.compress(bytes(64 << 20))

    def spoil(job_id: str, status: str) -> None:
        fields = {"data": bomb, "exc_info": bomb, "result": bomb, "timeout": "abc", "status": status}
        redis.hset(f"rq:job:{job_id}", mapping=fields)  # type: ignore[arg-type]
        redis.xadd(f"rq:results:{job_id}", {"type": 2, "exc_string": b64encode(bomb)})

    run = submit().splitlines()[0]
    tracemalloc.start()
    spoil(f"{run}-plan", "failed")
    redis.zadd("rq:failed:bulk", {f"{run}-plan": 1e12})
    assert "it left no error" in invoke("status", run).output
    submit()
    for shard in range(SHARDS):
        spoil(shard_job_id(run, shard), "finished")
    runs.plan(rows_per_shard=1)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert len(runs.jobs) == 1 + SHARDS


def test_a_parts_errors_count_once_however_often_it_is_recorded(redis: Redis, runs: Runs, run: str) -> None:
    redis.hset(run_key(run), "max_errors", "1")
    first, second, *_ = runs.jobs
    state = RunState(redis, run)
    for _ in range(3):  # another execution, or the same again after its worker was killed
        runs.run(first, answer=lambda request: refuse("x"))
    assert state.judge() is None
    assert not state.is_cancelled()
    runs.run(second, answer=lambda request: refuse("x"))
    assert state.is_cancelled()
