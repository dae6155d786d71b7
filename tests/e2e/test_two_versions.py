"""Workers of two versions share a queue: each leaves the runs of the other, and says so."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from jobs import cli
from jobs.common.keys import FORMAT
from jobs.runs.control import submit_run
from tests.rq_workers import ROOT, Workers, wait_until

PACKAGES = ("engine", "jobs", "sandbox", "worker")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose number is higher."""
    folder = tmp_path_factory.mktemp("newer")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    keys = folder / "jobs" / "common" / "keys.py"
    text = keys.read_text()
    assert f"\nFORMAT = {FORMAT}\n" in text
    keys.write_text(text.replace(f"\nFORMAT = {FORMAT}\n", f"\nFORMAT = {FORMAT + 1}\n"))
    return folder


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[Workers]:
    running = Workers(redis_url, tmp_path)
    running.redis.flushall()
    yield running
    running.close()
    running.redis.close()


@pytest.mark.parametrize("planner", ["newer", pytest.param("older", marks=pytest.mark.long)])
def test_each_leaves_the_runs_of_the_other_on_the_queue(
    workers: Workers, newer: Path, redis_url: str, tmp_path: Path, planner: str
) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(pa.table({"prompt": [f"p{row}" for row in range(6)]}), source)
    path = {"newer": os.pathsep.join([str(newer), str(ROOT)]), "older": str(ROOT)}
    other = "older" if planner == "newer" else "newer"
    run = submit_run(workers.redis, "bulk", input=str(source), output=str(output), rows_per_shard=1)
    workers.burst("--max-jobs", "1", queues=("bulk",), PYTHONPATH=path[planner])
    assert workers.queue("bulk").count == 6
    left = workers.start("--name", "left", queues=("bulk",), PYTHONPATH=path[other])

    def is_told() -> bool:
        status = CliRunner().invoke(cli.main, ["--url", redis_url, "status", run]).output
        return f"it was planned by a {planner} version of Tokenmill" in " ".join(status.split())

    wait_until(is_told)
    if planner == "newer":
        wait_until(
            lambda: "6 jobs were planned by a newer version of Tokenmill" in workers.log(left)
        )
    left.terminate()
    assert left.wait(timeout=60) == 0
    assert workers.queue("bulk").count == 6
    assert workers.queue("bulk").failed_job_registry.count == 0
    workers.burst(queues=("bulk",), PYTHONPATH=path[planner])
    assert (output / "_SUCCESS").exists()
    assert pq.read_table(output).column("error").null_count == 6
