"""How a worker leaves, and when it claims nothing: signals, RQ's commands and options."""

from __future__ import annotations

import signal
from pathlib import Path

from rq.command import send_shutdown_command
from rq.job import JobStatus

from tests.rq_workers import (
    Workers,
    leftovers,
    signal_until_it_ends,
    text_of,
    wait_until,
    wait_until_started,
)


def test_warm_shutdown_finishes_what_runs_and_takes_nothing_new(workers: Workers, tmp_path: Path) -> None:
    running = workers.queue("bulk").enqueue("jobs.complete", f"file:{tmp_path}/go", max_tokens=1)
    process = workers.start("--name", "w")
    wait_until_started(running)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: workers.redis.hexists("rq:worker:w", "shutdown_requested_date"))
    late = workers.queue("bulk").enqueue("jobs.complete", "b", max_tokens=1)
    (tmp_path / "go").touch()
    assert process.wait(timeout=60) == 0
    assert text_of(workers.result(running)) == f"echo:file:{tmp_path}/go"
    assert late.get_status() == JobStatus.QUEUED


def test_a_second_signal_gives_back_what_runs(workers: Workers) -> None:
    jobs = [workers.queue("bulk").enqueue("jobs.complete", "hang") for _ in range(3)]
    process = workers.start("--name", "w")
    wait_until_started(*jobs)
    assert signal_until_it_ends(process, signal.SIGINT) == 0
    assert [job.get_status() for job in jobs] == [JobStatus.QUEUED] * 3
    assert workers.queue("bulk").job_ids == [job.id for job in jobs]
    assert leftovers(workers.redis, "bulk") == []


def test_the_shutdown_command_is_a_warm_shutdown(workers: Workers) -> None:
    process = workers.start("--name", "w")
    wait_until(lambda: workers.redis.exists("tokenmill:worker:w"))
    send_shutdown_command(workers.redis, "w")
    assert process.wait(timeout=60) == 0


def test_a_suspended_worker_claims_nothing_until_resumed(workers: Workers) -> None:
    first = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1)
    workers.start("--name", "w")
    workers.result(first)
    workers.rq("suspend")
    held = workers.queue("bulk").enqueue("jobs.complete", "b", max_tokens=1)
    wait_until(lambda: workers.redis.hget("rq:worker:w", "state") == b"suspended")
    assert held.get_status() == JobStatus.QUEUED
    workers.rq("resume")
    assert text_of(workers.result(held)) == "echo:b"


def test_max_jobs_is_kept_also_when_many_wait(workers: Workers) -> None:
    jobs = [workers.queue("bulk").enqueue("jobs.complete", f"p{i}", max_tokens=2) for i in range(20)]
    process = workers.start("--max-jobs", "7")
    assert process.wait(timeout=60) == 0
    assert [job.get_status() for job in jobs] == [JobStatus.FINISHED] * 7 + [JobStatus.QUEUED] * 13


def test_max_idle_time_ends_an_idle_worker(workers: Workers) -> None:
    process = workers.start("--max-idle-time", "1")
    assert process.wait(timeout=60) == 0
    assert "idle for 1 seconds" in workers.log(process)
