"""Producers are served whichever RQ they have: 3, as the worker, or 2.12."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rq_suite.sdist import CannotFetch, rq_2
from tests.rq_workers import Workers

CLIENT = Path(__file__).parent / "rq_client.py"

SEEN = {
    "retries": ["failed", 0],
    "callbacks": [["finished", "failed"], ["failure", "success"]],
    "dependents": ["echo:child", "echo:late"],
    "cancelled": "canceled",
    "stopped": "stopped",
    "scheduled": "echo:later",
    "repeated": 3,
    "grouped": [["finished", "finished"], 2],
    "unique": "refused",
    "workers_shown": ["served-by-3"],
}
SEEN_BY_3 = SEEN | {
    "stopped_execution": "stopped",
    "rate_limited": ["finished", "finished", "finished"],
    "running": ["JOB"],
}


def seen_by_a_producer(workers: Workers, client_path: str = "", **environment: str) -> object:
    """What a producer saw of each feature. client_path: where its RQ is, "" for the installed one."""
    worker = workers.start("--name", "served-by-3", "--with-scheduler", **environment)
    done = subprocess.run(
        [sys.executable, str(CLIENT), workers.url],
        env={**workers.environment(**environment), "PYTHONPATH": client_path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worker.terminate()
    assert worker.wait(timeout=60) == 0, workers.log(worker)
    return json.loads(done.stdout)


@pytest.mark.long
def test_what_a_producer_does_with_rq_2_works(workers: Workers) -> None:
    try:
        client = rq_2()
    except CannotFetch as error:
        pytest.skip(f"RQ 2.12 cannot be fetched: {error}")
    assert seen_by_a_producer(workers, str(client)) == SEEN


@pytest.mark.usefixtures("new_interpreters")
def test_what_a_producer_does_with_rq_3_works_and_no_key_lacks_the_prefix(workers: Workers) -> None:
    """RQ and we read it when we are imported."""
    prefix = "{tenant}.rq"
    assert seen_by_a_producer(workers, RQ_KEY_PREFIX=prefix) == SEEN_BY_3
    named = [key.decode() for key in workers.redis.scan_iter()]
    # Those without are what the test's functions have written.
    assert [key for key in named if ":" in key and not key.startswith(f"{prefix}:")] == []
    assert [key for key in named if key.startswith(f"{prefix}:tokenmill:worker:served-by-3")]
