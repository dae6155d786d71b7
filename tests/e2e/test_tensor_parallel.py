"""`TOKENMILL_TENSOR_PARALLEL_SIZE=2` through `rq worker`: the same answers, and no process left behind."""

import os
import signal
import subprocess
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from rq.job import JobStatus

from ops.demo.prompts import BARE_PROMPT
from tests.e2e.conftest import DATES, RealWorkers
from tests.rq_workers import leftovers, stats_of, wait_until

pytestmark = pytest.mark.long

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
TWO_RANKS = {"TOKENMILL_TENSOR_PARALLEL_SIZE": "2", "TOKENMILL_DTYPE": "float32"}


def prompts(count: int) -> list[str]:
    texts = pq.read_table(DATES, columns=["text"])["text"].to_pylist()
    return [BARE_PROMPT.format(text=text) for text in texts[:count]]


def ranks_of(worker: subprocess.Popen[str]) -> list[psutil.Process]:
    """A worker's children, which are its ranks: it has no others here."""
    return psutil.Process(worker.pid).children(recursive=True)


def wait_until_ready(workers: RealWorkers, name: str) -> None:
    wait_until(lambda: stats_of(workers, name), timeout_s=60)


def test_answers_are_those_of_one_rank_and_a_warm_shutdown_leaves_nothing(
    workers: RealWorkers,
) -> None:
    """The signal reaches the ranks too, as from a supervisor that tells a whole group: it is not theirs."""
    queue = workers.queue("bulk")
    for prefix in ("one", "two"):
        jobs = [
            queue.enqueue("jobs.complete", p, job_id=f"{prefix}{i}", **GREEDY)
            for i, p in enumerate(prompts(24))
        ]
        jobs.append(
            queue.enqueue("jobs.complete", "The", job_id=f"{prefix}24", max_tokens=30, seed=7, n=2)
        )
        if prefix == "one":
            workers.burst("--name", "one", TOKENMILL_DTYPE="float32")
    worker = workers.start("--name", "two", **TWO_RANKS)
    wait_until_ready(workers, "two")
    ranks = ranks_of(worker)
    assert len(ranks) == 2
    for i in range(25):
        answer = workers.result(workers.job(f"two{i}"), timeout_s=60).return_value
        expected = workers.job(f"one{i}").return_value()
        assert [choice["text"] for choice in answer["choices"]] == [
            c["text"] for c in expected["choices"]
        ]
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]

    last = queue.enqueue("jobs.complete", "The", max_tokens=300, temperature=0, ignore_eos=True)
    wait_until(lambda: last.get_status() == JobStatus.STARTED)
    for process in (*ranks, worker):
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
    assert worker.wait(timeout=60) == 0, workers.log(worker)
    usage = workers.result(last).return_value["usage"]
    assert usage["completion_tokens"] == 300, "what ran was not finished"
    assert psutil.wait_procs(ranks, timeout=1)[1] == []
    assert leftovers(workers.redis, "bulk") == []


def test_a_killed_rank_ends_its_worker_and_loses_no_job(workers: RealWorkers) -> None:
    queue = workers.queue("bulk")
    worker = workers.start("--name", "two", **TWO_RANKS)
    wait_until_ready(workers, "two")
    ranks = ranks_of(worker)
    jobs = [
        queue.enqueue("jobs.complete", p, max_tokens=200, temperature=0, ignore_eos=True)
        for p in prompts(6)
    ]
    wait_until(lambda: jobs[0].get_status() == JobStatus.STARTED)
    ranks[1].kill()
    assert worker.wait(timeout=30) != 0
    assert "rank 1 failed: it was killed by SIGKILL" in workers.log(worker)
    assert psutil.wait_procs(ranks, timeout=1)[1] == []
    workers.burst("--name", "next", TOKENMILL_DTYPE="float32")
    for job in jobs:
        assert workers.result(job).return_value["usage"]["completion_tokens"] == 200
    assert leftovers(workers.redis, "bulk") == []
