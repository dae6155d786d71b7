"""`tokenmill cancel` of a run that real workers are at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.job import JobStatus

from jobs import cli
from jobs.parquet.names import part_name, shard_job_id
from tests.rq_workers import Workers, leftovers, wait_until, wait_until_started

ROWS_PER_SHARD = 3


@pytest.fixture
def workers(redis: Redis, redis_url: str, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(redis_url, tmp_path)
    yield started
    started.close()


def tokenmill(workers: Workers, *arguments: object) -> str:
    result = click.testing.CliRunner().invoke(cli.main, ["--url", workers.url, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_cancel_stops_the_shards_that_run_and_a_later_submit_resumes(
    workers: Workers, redis: Redis, tmp_path: Path
) -> None:
    gate, output = tmp_path / "gate", tmp_path / "out"
    prompts = ["a", "b", "c", *[f"file:{gate}"] * 45]  # the first shard can end, the others cannot
    pq.write_table(pa.table({"prompt": prompts, "id": range(48)}), tmp_path / "in.parquet")
    submit = ("submit", tmp_path / "in.parquet", output, "--rows-per-shard", ROWS_PER_SHARD)
    workers.start(TOKENMILL_MAX_NUM_SEQS="12", TOKENMILL_PREFETCH="0")
    run = tokenmill(workers, *submit).strip()
    wait_until((output / part_name(0)).exists)
    started = [workers.job(shard_job_id(run, shard)) for shard in range(1, 5)]
    wait_until_started(*started)

    cancelled = tokenmill(workers, "cancel", output)
    removed, stopped = map(int, re.findall(r"\d+", cancelled))
    assert removed + stopped == 15, cancelled
    assert stopped >= 4, "four fill the batch, and as many more may be claimed ahead"
    assert removed >= 4, "a worker claimed the whole run"
    wait_until(lambda: not leftovers(redis, "bulk"))
    assert "1 of 16 done, 0 started, 15 left" in tokenmill(workers, "status", run)
    assert [job.get_status() for job in started] == [JobStatus.STOPPED] * 4
    assert workers.queue("bulk").job_ids == []
    assert sorted(path.name for path in output.iterdir()) == ["_plan.json", part_name(0)]
    assert "cancelled" in tokenmill(workers, "status", run)

    first_part = (output / part_name(0)).stat()
    gate.touch()
    assert tokenmill(workers, *submit).strip() == run
    wait_until((output / "_SUCCESS").exists)
    table = pq.read_table(output)
    assert table["id"].to_pylist() == list(range(48))
    assert table["completion"].to_pylist() == [f"echo:{prompt}" for prompt in prompts]
    assert (output / part_name(0)).stat().st_mtime_ns == first_part.st_mtime_ns
    wait_until(lambda: "finished" in tokenmill(workers, "status", run))
    wait_until(lambda: not leftovers(redis, "bulk"))
    assert workers.queue("bulk").failed_job_registry.get_job_count(cleanup=False) == 0
