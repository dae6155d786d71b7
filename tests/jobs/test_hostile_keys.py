"""Keys in Redis that hold something else: they are passed over, or fail one run by name."""

from __future__ import annotations

import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from redis import Redis

from jobs.cli import commands as cli
from jobs.common.keys import run_key, run_lock_key, run_parts_key
from jobs.errors import RunKeyDamaged
from jobs.runs import state as run_state
from jobs.runs.names import shard_job_id
from jobs.runs.snapshot import read_snapshot
from jobs.runs.state import RunState
from tests.jobs.answering import feed, opened_task, queued_jobs, refuse, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.runs import Runs

ODD = b"\xff\xfe\x1b[2J"


@pytest.fixture
def tokenmill(redis_url: str) -> Callable[..., str]:
    """Run a command that has to succeed; return what it prints."""

    def run(*args: object) -> str:
        done = CliRunner().invoke(cli.main, ["--url", redis_url, *map(str, args)])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    return run


def spoil_queue(redis: Redis, run: str) -> None:
    redis.lpush("rq:queue:bulk", ODD)
    for registry in ("wip", "failed"):
        redis.zadd(f"rq:{registry}:bulk", {ODD + b":" + ODD: 1e12})
    redis.hset(b"rq:execution:" + ODD + b":" + ODD, "worker_name", ODD)


def spoil_workers(redis: Redis, run: str) -> None:
    for name in (ODD, b"text", b"list", b"typed", b"deep"):
        redis.sadd("rq:workers", b"rq:worker:" + name)
        redis.sadd("rq:workers:bulk", b"rq:worker:" + name)
        redis.hset(b"rq:worker:" + name, mapping={"queues": ODD, "state": ODD})
    redis.set("tokenmill:worker:text", ODD)
    redis.set("tokenmill:worker:list", '{"models": [["m"], 3]}')
    redis.rpush("tokenmill:worker:typed", "x")
    redis.set("tokenmill:worker:deep", "[" * 100_000)
    redis.set("rq:worker:set", "x")
    redis.sadd("rq:workers", "rq:worker:set")


def spoil_jobs(redis: Redis, run: str) -> None:
    for shard, meta in enumerate(["junk", "[1]", '{"rows_done": "x", "tokens": 1e400}', "9" * 5000]):
        redis.hset(f"rq:job:{run}-{shard}", mapping={"meta": meta, "status": ODD, "origin": ODD})
        redis.zadd("rq:wip:bulk", {f"{run}-{shard}:execution": 1e12})
    redis.hset(f"rq:job:{run}-plan", "status", ODD)


def spoil_run(redis: Redis, run: str) -> None:
    odd = {"rows": ODD, "shards": "9" * 5000, "model": ODD, "model_text": ODD, ODD: ODD}
    redis.hset(run_key(run), mapping=odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("spoil", [spoil_queue, spoil_workers, spoil_jobs, spoil_run])
def test_an_entry_that_cannot_be_read_is_passed_over(
    runs: Runs,
    tokenmill: Callable[..., str],
    redis: Redis,
    tmp_path: Path,
    spoil: Callable[[Redis, str], None],
) -> None:
    pq.write_table(pa.table({"prompt": list("abcd")}), runs.source)
    submit = ("submit", tmp_path / "in.parquet", runs.output, "--rows-per-shard", 1)
    tokenmill(*submit)
    planning = runs.jobs[0]
    run = planning.id.removesuffix("-plan")
    runs.work()
    spoil(redis, run)
    for command in (("status", run), ("info",), ("cancel", run), submit, ("status", run)):
        for line in tokenmill(*command).splitlines():
            assert line.isprintable()


def test_what_unpacks_to_far_more_than_it_has_stays_packed_and_keeps_no_run_from_going_on(
    runs: Runs, tokenmill: Callable[..., str], redis: Redis, tmp_path: Path
) -> None:
    bomb = zlib.compress(bytes(64 << 20))
    pq.write_table(pa.table({"prompt": list("abcd")}), runs.source)
    submit = ("submit", tmp_path / "in.parquet", runs.output, "--rows-per-shard", 1)
    run = tokenmill(*submit).splitlines()[0]
    plan_job, shards = f"{run}-plan", [shard_job_id(run, shard) for shard in range(4)]

    def spoil(job_id: str, status: str) -> None:
        fields = {"data": bomb, "exc_info": bomb, "result": bomb, "timeout": "abc", "status": status}
        redis.hset(f"rq:job:{job_id}", mapping=fields)  # type: ignore[arg-type]
        redis.xadd(f"rq:results:{job_id}", {"type": 2, "exc_string": b64encode(bomb)})

    tracemalloc.start()
    spoil(plan_job, "queued")
    tokenmill(*submit)
    renewed = redis.hget(f"rq:job:{plan_job}", "data")
    assert renewed is not None
    assert b'"rows_per_shard": 1' in zlib.decompress(renewed)
    spoil(plan_job, "failed")
    redis.zadd("rq:failed:bulk", {plan_job: 1e12})
    assert "it left no error" in tokenmill("status", run)
    tokenmill(*submit)
    assert redis.zcard("rq:failed:bulk") == 0
    for shard in shards:
        spoil(shard, "finished")
    runs.plan(rows_per_shard=1)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 32 << 20
    assert {job.id for job in runs.jobs} == {plan_job, *shards}


@pytest.fixture
def submit(invoke: Invoke, tmp_path: Path) -> Callable[[], str]:
    """Submit a run of three shards; return what that printed."""
    pq.write_table(pa.table({"prompt": [*"abc"]}), tmp_path / "in.parquet")

    def run() -> str:
        done = invoke("submit", tmp_path / "in.parquet", tmp_path / "out", "--rows-per-shard", 1)
        return f"{done.output}{done.exit_code}"

    return run


def put(redis: Redis, key: str, kind: str) -> None:
    redis.delete(key)
    if kind == "list":
        redis.rpush(key, "x")
    else:
        redis.set(key, "x")


@pytest.mark.parametrize(
    ("key_of", "kind", "told"),
    [
        (run_key, "string", "a string in this Redis, expected a hash"),
        (run_parts_key, "string", "a string in this Redis, expected a hash"),
        (run_lock_key, "string", "a string without an end in this Redis, expected a string that ends"),
    ],
)
def test_a_runs_key_of_another_type_fails_that_run_at_once_by_name(
    redis: Redis,
    invoke: Invoke,
    submit: Callable[[], str],
    make_context: MakeContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key_of: Callable[[str], str],
    kind: str,
    told: str,
) -> None:
    monkeypatch.setattr(run_state, "LOCK_WAIT_S", 0.01)  # nobody waits for such a lock
    run = submit().splitlines()[0]
    key = key_of(run)
    work_off(redis, make_context)
    first, second, _ = queued_jobs(redis)
    begun = opened_task(make_context(), first.func_name, first.args)
    feed(begun)

    put(redis, key, kind)
    names = f"the key {key} is {told}"
    if key_of is not run_lock_key:
        with pytest.raises(RunKeyDamaged, match=names):
            begun.result()
        assert names in invoke("status", run).output
    if key_of is run_key:
        with pytest.raises(RunKeyDamaged, match=names):
            run_task(make_context(), second.func_name, *second.args)
    if key_of is not run_parts_key:
        assert names in submit()
    assert names in invoke("cancel", run).output
    with pytest.raises(RunKeyDamaged, match=names):
        score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=1)
    begun.close()

    redis.delete(key)
    assert submit().endswith("0")
    work_off(redis, make_context)
    work_off(redis, make_context)
    assert read_snapshot(redis, run).finished
    assert pq.read_table(tmp_path / "out")["completion"].to_pylist() == [*"ABC"]


def test_a_parts_errors_count_once_however_often_it_is_recorded(
    redis: Redis, submit: Callable[[], str], make_context: MakeContext
) -> None:
    run = submit().splitlines()[0]
    work_off(redis, make_context)
    redis.hset(run_key(run), "max_errors", "1")
    first, second, _ = queued_jobs(redis)
    state = RunState(redis, run)
    for _ in range(3):  # another execution, or the same again after its worker was killed
        run_task(make_context(), first.func_name, *first.args, answer=lambda request: refuse("x"))
    assert state.judge() is None
    assert not state.is_cancelled()
    run_task(make_context(), second.func_name, *second.args, answer=lambda request: refuse("x"))
    assert state.is_cancelled()
