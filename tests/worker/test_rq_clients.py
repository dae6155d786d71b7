"""Producers are served whichever RQ they have: 2.12, as the worker, or 3, which `pip install rq` gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rq_suite.sdist import CannotFetch, rq_3
from tests.rq_workers import Workers

CLIENT = Path(__file__).parent / "rq_client.py"

SEEN = {
    "results": "echo:a",
    "many": ["echo:a", "echo:b"],
    "retries": ["failed", 0],
    "returned_retry": True,
    "callbacks": [["finished", "failed"], ["failure", "success"]],
    "dependents": ["echo:child", "echo:late"],
    "cancelled": "canceled",
    "stopped": "stopped",
    "meta": ["finished", {"done": 3}],
    "scheduled": "echo:later",
    "repeated": 3,
    "grouped": [["finished", "finished"], 2],
    "unique": "refused",
    "workers_shown": ["served-by-2"],
}
SEEN_BY_3 = SEEN | {"stopped_execution": "stopped", "rate_limited": ["finished", "finished", "finished"]}


def seen_by_a_producer(workers: Workers, client_path: str) -> object:
    """What a producer with the RQ of client_path saw of each feature; "" for the installed one."""
    worker = workers.start("--name", "served-by-2", "--with-scheduler")
    done = subprocess.run(
        [sys.executable, str(CLIENT), workers.url],
        env={**workers.environment(), "PYTHONPATH": client_path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worker.terminate()
    assert worker.wait(timeout=60) == 0, workers.log(worker)
    return json.loads(done.stdout)


def test_what_a_producer_does_with_rq_3_works(workers: Workers) -> None:
    try:
        client = rq_3()
    except CannotFetch as error:
        pytest.skip(f"RQ 3 cannot be fetched: {error}")
    assert seen_by_a_producer(workers, str(client)) == SEEN_BY_3


def test_what_a_producer_does_with_rq_2_works(workers: Workers) -> None:
    assert seen_by_a_producer(workers, "") == SEEN
