"""What a producer may write into the keys that `tokenmill` and the planner read: it is passed over."""

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
from jobs.common.keys import run_key, run_parts_key
from jobs.context import JobContext
from jobs.runs.plans.names import shard_job_id
from tests.jobs.answering import queued_jobs, score_parquet, work_off

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


def spoil_parts(redis: Redis, run: str) -> None:
    redis.hset(run_parts_key(run), mapping={ODD: ODD, "x": "{}", "7": '{"rows": 1}'})  # type: ignore[dict-item]
    for stats in redis.hvals(run_parts_key(run)):
        if stats.startswith(b"{") and b'"rows": 1,' in stats:
            redis.hset(run_parts_key(run), "9", stats.replace(b'"rows": 1,', b'"rows": "x",'))


@pytest.mark.parametrize("spoil", [spoil_queue, spoil_workers, spoil_jobs, spoil_run, spoil_parts])
def test_an_entry_that_cannot_be_read_is_passed_over(
    tokenmill: Callable[..., str],
    redis: Redis,
    make_context: Callable[[], JobContext],
    tmp_path: Path,
    spoil: Callable[[Redis, str], None],
) -> None:
    pq.write_table(pa.table({"prompt": list("abcd")}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet", tmp_path / "out", "--rows-per-shard", 1)
    tokenmill(*submit)
    planning = queued_jobs(redis)[0]
    run = planning.id.removesuffix("-plan")
    work_off(redis, make_context)
    spoil(redis, run)
    for command in (("status", run), ("info",), ("cancel", run), submit, ("status", run)):
        for line in tokenmill(*command).splitlines():
            assert line.isprintable()


def test_what_unpacks_to_far_more_than_it_has_stays_packed_and_keeps_no_run_from_going_on(
    tokenmill: Callable[..., str],
    redis: Redis,
    make_context: Callable[[], JobContext],
    tmp_path: Path,
) -> None:
    bomb = zlib.compress(bytes(64 << 20))
    pq.write_table(pa.table({"prompt": list("abcd")}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet", tmp_path / "out", "--rows-per-shard", 1)
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
    score_parquet(make_context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=1)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 32 << 20
    assert {job.id for job in queued_jobs(redis)} == {plan_job, *shards}
