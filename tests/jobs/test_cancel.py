"""`tokenmill cancel` of a run that real workers are at."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.job import JobStatus

from jobs.cli import commands as cli
from jobs.common.keys import held_key, worker_key
from jobs.runs.plans.names import part_name, shard_job_id
from tests.forking import ForkedWorkers
from tests.rq_workers import Workers, leftovers, wait_until

ROWS_PER_SHARD = 3
NUM_SHARDS = 32


@pytest.fixture
def workers(redis: Redis, redis_url: str, tmp_path: Path) -> Iterator[Workers]:
    started = ForkedWorkers(redis_url, tmp_path)
    yield started
    started.close()


def tokenmill(workers: Workers, *arguments: object) -> str:
    result = click.testing.CliRunner().invoke(cli.main, ["--url", workers.url, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def held_shards(workers: Workers, run: str) -> list[int]:
    """What a worker holds of a run."""
    held = {member.decode().partition(":")[0] for member in workers.redis.hkeys(held_key("bulk"))}
    return [shard for shard in range(NUM_SHARDS) if shard_job_id(run, shard) in held]


def test_cancel_stops_the_shards_that_run_and_a_later_submit_resumes(
    workers: Workers, redis: Redis, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    gates = [tmp_path / f"gate-{shard}" for shard in range(NUM_SHARDS)]
    prompts = [f"file:{gate}" for gate in gates for _ in range(ROWS_PER_SHARD)]
    pq.write_table(pa.table({"prompt": prompts, "id": range(len(prompts))}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet", output, "--rows-per-shard", ROWS_PER_SHARD)
    workers.start(TOKENMILL_MAX_NUM_SEQS="12", TOKENMILL_PREFETCH="0")
    run = tokenmill(workers, *submit).strip()
    # Of the shards that are claimed together any may fill the batch first: let them all end.
    wait_until(lambda: held_shards(workers, run))
    first = held_shards(workers, run)
    for shard in first:
        gates[shard].touch()
    wait_until(lambda: all((output / part_name(shard)).exists() for shard in first))
    wait_until(lambda: len(set(held_shards(workers, run)) - set(first)) >= 4)  # as many fill the batch
    wait_until(lambda: not set(held_shards(workers, run)) & set(first))

    cancelled = tokenmill(workers, "cancel", output)
    left = NUM_SHARDS - len(first)
    removed, stopped = map(int, re.findall(r"\d+", cancelled))
    assert removed + stopped == left, cancelled
    assert stopped >= 4, "four fill the batch, and as many more may be claimed ahead"
    assert removed >= 4, "a worker claimed the whole run"
    wait_until(lambda: not leftovers(redis, "bulk"))
    assert f"{len(first)} of {NUM_SHARDS} done, 0 started, {left} left" in tokenmill(workers, "status", run)
    statuses = [redis.hget(f"rq:job:{shard_job_id(run, shard)}", "status") for shard in range(NUM_SHARDS)]
    assert statuses.count(JobStatus.STOPPED.encode()) == stopped
    assert workers.queue("bulk").job_ids == []
    assert sorted(path.name for path in output.iterdir()) == ["_plan.json", *map(part_name, first)]
    assert "cancelled" in tokenmill(workers, "status", run)

    written = {shard: (output / part_name(shard)).stat().st_mtime_ns for shard in first}
    for gate in gates:
        gate.touch()
    assert tokenmill(workers, *submit).strip() == run
    wait_until((output / "_SUCCESS").exists)
    table = pq.read_table(output)
    assert table["id"].to_pylist() == list(range(len(prompts)))
    assert table["completion"].to_pylist() == [f"echo:{prompt}" for prompt in prompts]
    assert {shard: (output / part_name(shard)).stat().st_mtime_ns for shard in first} == written
    wait_until(lambda: "finished" in tokenmill(workers, "status", run))
    wait_until(lambda: not leftovers(redis, "bulk"))
    assert workers.queue("bulk").failed_job_registry.get_job_count(cleanup=False) == 0


def test_a_shard_that_is_stopped_while_it_opens_opens_to_its_end_and_closes(
    workers: Workers, redis: Redis, tmp_path: Path
) -> None:
    """Raised into the thread that opens it, an error could leave the lock of a shared reader behind."""
    gate, output = tmp_path / "gate", tmp_path / "out"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet")
    worker = workers.start(OPEN_GATE=str(gate), worker_class="tests.worker.slow_files.GatedOpenWorker")
    run = tokenmill(workers, "submit", tmp_path / "in.parquet", output).strip()
    wait_until(lambda: held_shards(workers, run) == [0])
    assert workers.job(shard_job_id(run, 0)).get_status() == JobStatus.QUEUED, "no row of it has begun"
    assert "1 told to stop" in tokenmill(workers, "cancel", run)
    wait_until(lambda: not leftovers(redis, "bulk"))
    gate.touch()
    worker.terminate()
    assert worker.wait(timeout=60) == 0
    assert [path.name for path in tmp_path.glob("gate*")] == ["gate"]
    assert [path.name for path in output.iterdir()] == ["_plan.json"]


def jobs_held(redis: Redis, worker: str) -> int | None:
    """What a worker's statistics say, None before it serves."""
    told = redis.get(worker_key(worker))
    return None if told is None else json.loads(told)["jobs_held"]


def test_a_run_that_is_submitted_again_outlives_the_stops_of_the_cancel_before(
    workers: Workers, redis: Redis, tmp_path: Path
) -> None:
    """A worker that is frozen in between hears of the cancel after the planner has counted its shards."""
    gate, output = tmp_path / "gate", tmp_path / "out"
    pq.write_table(pa.table({"prompt": [f"file:{gate}"] * 4, "id": range(4)}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet", output, "--rows-per-shard", 2)
    frozen = workers.start("--name", "frozen", TOKENMILL_LEASE_S="120")
    run = tokenmill(workers, *submit).strip()
    wait_until(lambda: jobs_held(redis, "frozen") == 2)
    frozen.send_signal(signal.SIGSTOP)
    assert "0 jobs removed, 2 told to stop" in tokenmill(workers, "cancel", run)
    workers.start("--name", "other", TOKENMILL_LEASE_S="120")
    tokenmill(workers, *submit)
    wait_until(lambda: workers.job(f"{run}-plan").get_status() == JobStatus.FINISHED)
    # All of it, or the frozen one would claim its share when it wakes, and hold that.
    keys = [f"rq:job:{shard_job_id(run, shard)}" for shard in range(2)]
    wait_until(lambda: [redis.hget(key, "worker_name") for key in keys] == [b"other"] * 2)
    frozen.send_signal(signal.SIGCONT)
    wait_until(lambda: jobs_held(redis, "frozen") == 0)
    gate.touch()
    wait_until((output / "_SUCCESS").exists)
    assert pq.read_table(output)["id"].to_pylist() == [*range(4)]
    wait_until(lambda: f"run {run}: finished" in tokenmill(workers, "status", run))
    wait_until(lambda: not leftovers(redis, "bulk"))
    assert workers.queue("bulk").failed_job_registry.get_job_count(cleanup=False) == 0
