"""Redis behind Sentinel, which RQ's settings file names: work goes on with what the replica has."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis.sentinel import MasterNotFoundError, Sentinel
from rq import Queue

from tests.forking import ForkedWorkers
from tests.redis_server import redis_server_executable, wait_until_ready
from tests.rq_workers import text_of, wait_until

NAME = "mine"

Start = Callable[..., tuple[subprocess.Popen[bytes], int]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def sentinel_master(asked: int) -> int | None:
    """Return the port of the master as Sentinel tells it, None while it knows of none."""
    try:
        return int(Sentinel([("127.0.0.1", asked)]).discover_master(NAME)[1])
    except MasterNotFoundError:
        return None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers, each on a port of its own."""
    with ExitStack() as stack:

        def run(*options: str) -> tuple[subprocess.Popen[bytes], int]:
            port = free_port()
            folder = tmp_path / str(port)
            folder.mkdir()
            (folder / "conf").write_text("")  # Sentinel writes into it
            command = [redis_server_executable(), str(folder / "conf"), "--port", str(port)]
            process = subprocess.Popen(
                [*command, "--dir", str(folder), *options], stdout=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until_ready(f"redis://127.0.0.1:{port}", process)
            return process, port

        yield run


@pytest.fixture
def workers(start: Start, tmp_path: Path) -> Iterator[ForkedWorkers]:
    running = ForkedWorkers("redis://", tmp_path)
    yield running
    running.close()


@pytest.mark.long
def test_a_failover_during_work_loses_no_job_that_the_replica_has(
    start: Start, workers: ForkedWorkers, tmp_path: Path
) -> None:
    master, port = start("--save", "")
    _, replica = start("--save", "", "--replicaof", "127.0.0.1", str(port))
    watched = ["--sentinel", "monitor", NAME, "127.0.0.1", str(port), "1"]
    soon = ["--sentinel", "down-after-milliseconds", NAME, "300"]
    _, asked = start("--sentinel", *watched, *soon)
    workers.redis = Sentinel([("127.0.0.1", asked)]).master_for(NAME)
    queue: Queue = workers.queue("bulk")
    gate = tmp_path / "gate"
    jobs = [queue.enqueue("jobs.complete", f"file:{gate}", max_tokens=1) for _ in range(20)]
    late = queue.enqueue_in(timedelta(seconds=1), "jobs.complete", "late", max_tokens=1)
    (tmp_path / "at_sentinel.py").write_text(
        f"SENTINEL = {{'INSTANCES': [('127.0.0.1', {asked})], 'MASTER_NAME': {NAME!r}}}\n"
    )
    workers.start("-c", "at_sentinel", "--with-scheduler", RQ_REDIS_URL="")
    wait_until(lambda: workers.redis.hlen("tokenmill:held:bulk"))
    pq.write_table(pa.table({"prompt": [f"file:{gate}", *"abcdef"]}), tmp_path / "in.parquet")
    queue.enqueue(
        "jobs.score_parquet", str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=2
    )
    wait_until(
        lambda: any(workers.redis.scan_iter("rq:executions:*-00003"))
    )  # the run's last shard is held
    assert workers.redis.wait(1, 10_000) == 1
    master.kill()
    gate.touch()
    wait_until(lambda: sentinel_master(asked) == replica)
    assert [text_of(workers.result(job)) for job in jobs] == [f"echo:file:{gate}"] * 20
    assert text_of(workers.result(late)) == "echo:late"
    assert [len(job.results()) for job in (*jobs, late)] == [1] * 21
    wait_until((tmp_path / "out" / "_SUCCESS").exists)
    assert pq.read_table(tmp_path / "out")["completion"].to_pylist() == [
        f"echo:file:{gate}",
        *map("echo:{}".format, "abcdef"),
    ]
