"""Workers that die, freeze or lose their engine: no job is lost, none ends twice."""

import os
import signal
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rq import Retry
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from rq.serializers import JSONSerializer

from jobs.common.worker_deaths import read_deaths
from tests.rq_workers import Workers, leftovers, stats_of, text_of, wait_until, wait_until_started


def ends(workers: Workers, queue: str) -> list[str]:
    """Ids in the finished and failed registries, doubles included."""
    registries = [
        kind(queue, connection=workers.redis, serializer=JSONSerializer)
        for kind in (FinishedJobRegistry, FailedJobRegistry)
    ]
    return [job_id for registry in registries for job_id in registry.get_job_ids()]


def enqueue(workers: Workers, prompt: str, **options: object) -> Job:
    return workers.queue("bulk").enqueue("jobs.complete", prompt, max_tokens=2, **options)


def test_jobs_of_a_killed_worker_are_run_by_another_with_and_without_retry(
    workers: Workers, tmp_path: Path
) -> None:
    gate = f"file:{tmp_path}/go"
    jobs = [enqueue(workers, gate, retry=Retry(max=1) if i % 2 else None) for i in range(8)]
    first = workers.start("--name", "first")
    wait_until_started(*jobs)
    told = stats_of(workers, "first")
    assert (told["host"], told["pid"]) == (socket.gethostname(), first.pid)
    assert told["memory_bytes"] > 1 << 20
    first.kill()
    first.wait()
    (tmp_path / "go").touch()
    workers.rq("info", "--worker-class", "worker.BatchWorker")
    workers.start()
    for i, job in enumerate(jobs):
        assert text_of(workers.result(job)) == f"echo:{gate}"
        job.refresh()
        assert len(job.results()) == 1
        assert job.retries_left == (1 if i % 2 else None), "a worker's death used up a retry"
    assert sorted(ends(workers, "bulk")) == sorted(job.id for job in jobs)
    assert leftovers(workers.redis, "bulk") == []
    (death,) = read_deaths(workers.redis)
    assert (death.worker, sorted(death.job_ids)) == ("first", sorted(job.id for job in jobs))


def test_jobs_beside_one_that_kills_its_workers_are_not_blamed(
    workers: Workers, tmp_path: Path
) -> None:
    gate = f"file:{tmp_path}/go"
    beside = [
        workers.queue(name).enqueue("jobs.complete", gate) for name in ("bulk", "high", "bulk")
    ]
    poison = enqueue(workers, "die")
    last = enqueue(workers, gate)
    for _ in range(2):
        assert workers.start(TOKENMILL_MAX_WORKER_DEATHS="3").wait(timeout=60) == -signal.SIGKILL
    (tmp_path / "go").touch()
    while poison.get_status() != JobStatus.FAILED:
        workers.start(TOKENMILL_MAX_WORKER_DEATHS="3")
        wait_until(
            lambda: (
                workers.processes[-1].poll() is not None or poison.get_status() == JobStatus.FAILED
            )
        )
    assert len(workers.processes) == 4, (
        "it took more than its last life and one worker to set it aside"
    )
    assert "3 workers died while they ran this job" in (workers.result(poison).exc_string or "")
    for job in (*beside, last):
        assert text_of(workers.result(job)) == f"echo:{gate}"
    assert leftovers(workers.redis, "bulk", "high") == []


def test_a_frozen_worker_that_thaws_leaves_one_part_of_each_shard(
    workers: Workers, tmp_path: Path
) -> None:
    prompts = [f"file:{tmp_path}/go"] * 8
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    output = tmp_path / "out"
    workers.queue("bulk").enqueue(
        "jobs.score_parquet", str(tmp_path / "in.parquet"), str(output), rows_per_shard=2
    )
    frozen = workers.start("--name", "frozen")
    wait_until(lambda: stats_of(workers, "frozen").get("jobs_held") == 4)
    os.kill(frozen.pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    workers.start("--name", "other")
    wait_until(lambda: (output / "_SUCCESS").exists())
    parts = {part.name: part.stat().st_ino for part in output.glob("part-*")}
    os.kill(frozen.pid, signal.SIGCONT)
    wait_until(lambda: stats_of(workers, "frozen").get("jobs_held") == 0)
    workers.rq("info")
    assert {part.name: part.stat().st_ino for part in output.glob("part-*")} == parts
    assert len(parts) == 4
    assert pq.read_table(output)["completion"].to_pylist() == [
        f"echo:{prompt}" for prompt in prompts
    ]
    wait_until(lambda: not list(output.glob("_tmp.*")))
    ended = ends(workers, "bulk")
    assert len(ended) == len(set(ended)) == 5
    assert all(len(workers.job(job_id).results()) == 1 for job_id in ended)
    assert leftovers(workers.redis, "bulk") == []


def test_an_engine_that_raises_stops_the_worker_with_an_error_and_gives_its_jobs_back(
    workers: Workers,
) -> None:
    fine, crash = enqueue(workers, "hang"), enqueue(workers, "crash")
    worker = workers.start(TOKENMILL_MAX_WORKER_DEATHS="2")
    assert worker.wait(timeout=60) == 1
    assert "told to crash" in workers.log(worker)
    assert {fine.get_status(), crash.get_status()} == {JobStatus.QUEUED}
    assert leftovers(workers.redis, "bulk") == []


def test_a_worker_without_redis_keeps_its_work_and_delivers_it_later(
    workers: Workers, tmp_path: Path
) -> None:
    """The server is frozen for longer than a lease and longer than the client's patience."""
    job = enqueue(workers, f"file:{tmp_path}/go")
    worker = workers.start("--name", "w", PERIODS_S="3")
    wait_until_started(job)
    server = int(workers.redis.info("server")["process_id"])
    os.kill(server, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        wait_until(lambda: "Redis did not answer" in workers.log(worker), timeout_s=40)
    finally:
        os.kill(server, signal.SIGCONT)
    assert text_of(workers.result(job)) == f"echo:file:{tmp_path}/go"
    assert len(job.results()) == 1
    assert worker.poll() is None
