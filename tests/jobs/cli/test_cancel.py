"""A run is cancelled: what waits goes, what runs is told to stop, and a later submit resumes."""

import re
from pathlib import Path

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.job import JobStatus

from jobs import cli
from jobs.common.keys import held_key
from jobs.errors import RunCancelled
from jobs.runs.plans.names import part_name, shard_job_id
from tests.jobs.answering import score_parquet
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs
from tests.rq_workers import Workers, leftovers, wait_until

ROWS_PER_SHARD, NUM_SHARDS = 3, 32


def tokenmill(workers: Workers, *arguments: object) -> str:
    result = click.testing.CliRunner().invoke(
        cli.main, ["--url", workers.url, *map(str, arguments)]
    )
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
    pq.write_table(
        pa.table({"prompt": prompts, "id": range(len(prompts))}), tmp_path / "in.parquet"
    )
    submit = ("submit", tmp_path / "in.parquet", output, "--rows-per-shard", ROWS_PER_SHARD)
    workers.start(TOKENMILL_MAX_NUM_SEQS="12", TOKENMILL_PREFETCH="0")
    run = tokenmill(workers, *submit).strip()
    # Of the shards that are claimed together any may fill the batch first: let them all end.
    wait_until(lambda: held_shards(workers, run))
    first = held_shards(workers, run)
    for shard in first:
        gates[shard].touch()
    wait_until(lambda: all((output / part_name(shard)).exists() for shard in first))
    wait_until(
        lambda: len(set(held_shards(workers, run)) - set(first)) >= 4
    )  # as many fill the batch
    wait_until(lambda: not set(held_shards(workers, run)) & set(first))

    cancelled = tokenmill(workers, "cancel", output)
    left = NUM_SHARDS - len(first)
    removed, stopped = map(int, re.findall(r"\d+", cancelled))
    assert removed + stopped == left, cancelled
    assert stopped >= 4, "four fill the batch, and as many more may be claimed ahead"
    assert removed >= 4, "a worker claimed the whole run"
    wait_until(lambda: not leftovers(redis, "bulk"))
    assert f"{len(first)} of {NUM_SHARDS} done, 0 started, {left} left" in tokenmill(
        workers, "status", run
    )
    statuses = [
        redis.hget(f"rq:job:{shard_job_id(run, shard)}", "status") for shard in range(NUM_SHARDS)
    ]
    assert statuses.count(JobStatus.STOPPED.encode()) == stopped
    assert workers.queue("bulk").job_ids == []
    kept = ["_journal", "_keys", "_plan.json", *map(part_name, first)]
    assert sorted(path.name for path in output.iterdir()) == kept
    assert "cancelled" in tokenmill(workers, "status", run)

    assert "requeued 0 jobs" in tokenmill(workers, "requeue", "--queue", "bulk", "--all")
    (one, *_) = [
        shard for shard, status in enumerate(statuses) if status == JobStatus.STOPPED.encode()
    ]
    workers.rq("requeue", "-S", "json", "--queue", "bulk", shard_job_id(run, one))
    requeued = workers.job(shard_job_id(run, one))
    wait_until(lambda: requeued.get_status() == JobStatus.FAILED)
    assert "`tokenmill submit` with the same arguments resumes it" in str(
        workers.result(requeued).exc_string
    )

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


def test_a_cancelled_planning_that_its_workers_death_runs_again_does_not_revive_the_run(
    runs: Runs, invoke: Invoke, make_context: MakeContext, source: Path
) -> None:
    arguments = (str(source), str(runs.output))
    planning = make_context()
    run = score_parquet(planning, *arguments, rows_per_shard=1)["run"]
    claimed = runs.jobs[0]
    assert "5 jobs removed" in invoke("cancel", run).stdout
    with pytest.raises(RunCancelled):
        score_parquet(planning, *arguments, rows_per_shard=1)
    with pytest.raises(RunCancelled):  # a shard that was claimed just before
        runs.run(claimed)
    assert runs.jobs == []
    assert "cancelled" in invoke("status", run).stdout
    runs.plan(*arguments, rows_per_shard=1)
    assert len(runs.jobs) == 5
    runs.work()
    assert "is finished: nothing was left to cancel" in invoke("cancel", run).stdout
