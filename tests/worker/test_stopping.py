"""A worker that is told to stop says what it does, is seen to do it, and ends in the time it is given."""

import json
import signal
import threading
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rq.command import send_shutdown_command
from rq.job import JobStatus

from jobs.cli import main
from jobs.common.keys import WORKER_STATS_TTL_S
from jobs.common.workers import read_workers, worker_names
from jobs.runs.plans.names import shard_job_id
from tests.jobs.s3_server import BUCKET, Fault, FaultyProxy, running_s3
from tests.rq_workers import (
    Workers,
    leftovers,
    signal_until_it_ends,
    stats_of,
    text_of,
    wait_until,
    wait_until_started,
)

F = "tests.worker.functions."


def test_a_worker_that_drains_says_so_in_its_log_in_rq_info_and_in_its_key(
    workers: Workers, tmp_path: Path
) -> None:
    gate = f"file:{tmp_path}/go"
    jobs = [workers.queue("bulk").enqueue("jobs.complete", gate, max_tokens=1) for _ in range(2)]
    process = workers.start("--name", "w")
    wait_until_started(*jobs)
    wait_until(lambda: stats_of(workers, "w").get("state") == "busy")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: stats_of(workers, "w").get("state") == "draining")
    shown = workers.rq("info", "--raw", "-w", "worker.BatchWorker")
    assert ") draining high, bulk" in shown.partition("worker w ")[2]
    late = workers.queue("bulk").enqueue("jobs.complete", "b", max_tokens=1)
    assert (
        "stopping: 2 jobs that have begun are finished, 0 that have not begun are given back now, nothing more is "
        "claimed; what still runs is given back at a second signal"
    ) in workers.log(process)
    (tmp_path / "go").touch()
    assert process.wait(timeout=60) == 0
    assert [text_of(workers.result(job)) for job in jobs] == [f"echo:{gate}"] * 2
    assert stats_of(workers, "w")["state"] == "stopped"
    assert late.get_status() == JobStatus.QUEUED


def test_what_has_not_begun_is_given_back_at_once_and_in_order(
    workers: Workers, tmp_path: Path
) -> None:
    gate = f"file:{tmp_path}/go"
    queue = workers.queue("bulk")
    jobs = [queue.enqueue("jobs.complete", gate, max_tokens=1) for _ in range(6)]
    process = workers.start("--name", "w", TOKENMILL_MAX_NUM_SEQS="2", TOKENMILL_PREFETCH="8")
    wait_until(lambda: stats_of(workers, "w").get("jobs_held") == 6)
    wait_until_started(*jobs[:2])
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: queue.job_ids == [job.id for job in jobs[2:]])
    assert (
        "2 jobs that have begun are finished, 4 that have not begun are given back now"
        in workers.log(process)
    )
    (tmp_path / "go").touch()
    assert process.wait(timeout=60) == 0
    assert [job.get_status() for job in jobs] == [JobStatus.FINISHED] * 2 + [JobStatus.QUEUED] * 4


def test_what_still_runs_when_the_time_to_drain_is_over_is_given_back(workers: Workers) -> None:
    jobs = [workers.queue("bulk").enqueue("jobs.complete", "hang") for _ in range(3)]
    jobs.append(workers.queue("bulk").enqueue(F + "linger"))
    process = workers.start("--name", "w", TOKENMILL_DRAIN_S="0.2")
    wait_until_started(*jobs)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert "what still runs is given back after 0.2 s or at a second signal" in workers.log(process)
    assert "TOKENMILL_DRAIN_S is over: giving back the 4 jobs that still run" in workers.log(
        process
    )
    assert [job.get_status() for job in jobs] == [JobStatus.QUEUED] * 4
    assert workers.queue("bulk").job_ids == [job.id for job in jobs]
    assert leftovers(workers.redis, "bulk") == []


def test_a_shard_whose_part_the_store_refuses_is_given_back(workers: Workers) -> None:
    with running_s3() as s3, closing(FaultyProxy(s3.url)) as proxy:
        s3.put_rows("data/in.parquet", pa.table({"prompt": ["a", "b"]}))
        asked = threading.Event()

        def refuse_parts(method: str, path: str) -> Fault | None:
            if method not in {"PUT", "POST"} or "part-" not in path:
                return None
            asked.set()
            return "503"

        proxy.choose = refuse_parts
        queue, root = workers.queue("bulk"), f"s3://{BUCKET}/data"
        queue.enqueue(
            "jobs.score_parquet", f"{root}/in.parquet", f"{root}/out", prompt_column="prompt"
        )
        settings = {
            **s3.environment(proxy.url),
            "TOKENMILL_DATA_ROOTS": root,
            "TOKENMILL_DRAIN_S": "0",
        }
        process = workers.start("--name", "w", **settings)
        assert asked.wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert leftovers(workers.redis, "bulk") == []
        (shard,) = queue.jobs
        assert shard.get_status() == JobStatus.QUEUED


def test_drain_stops_a_worker_from_any_machine_and_names_one_that_is_not_there(
    workers: Workers, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    job = workers.queue("bulk").enqueue("jobs.complete", f"file:{gate}", max_tokens=1)
    process = workers.start("--name", "w")
    wait_until_started(job)
    drained = CliRunner().invoke(main, ["--url", workers.url, "drain", "w", "other"])
    assert drained.exit_code == 1
    assert "worker w drains and stops" in drained.output
    assert "no worker named other listens" in drained.output
    wait_until(lambda: stats_of(workers, "w")["state"] == "draining")
    gate.touch()
    assert process.wait(timeout=60) == 0
    assert job.get_status(refresh=True) == JobStatus.FINISHED


def test_shards_that_are_handed_back_are_done_by_others_and_their_rows_once(
    workers: Workers, tmp_path: Path
) -> None:
    """As a supervisor stops a worker, with SIGTERM and a time, while shards run that take longer."""
    rows = [f"file:{tmp_path}/go", *map(str, range(9))]
    pq.write_table(pa.table({"id": range(10), "prompt": rows}), tmp_path / "in.parquet")
    paths = str(tmp_path / "in.parquet"), str(tmp_path / "out")
    queue = workers.queue("bulk")
    queue.enqueue("jobs.score_parquet", *paths, prompt_column="prompt", rows_per_shard=5)
    process = workers.start("--name", "w", TOKENMILL_DRAIN_S="0.2")
    wait_until((tmp_path / "out" / "part-00001.parquet").exists)
    # The second shard may end before the first begins, and a shard that has not begun goes back at once.
    run = json.loads((tmp_path / "out" / "_plan.json").read_text())["run"]
    wait_until_started(workers.job(shard_job_id(run, 0)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert "TOKENMILL_DRAIN_S is over: giving back the 1 jobs that still run" in workers.log(
        process
    )
    assert len(queue.job_ids) == 1
    (tmp_path / "go").touch()
    workers.burst()
    assert (tmp_path / "out" / "_SUCCESS").exists()
    found = pq.read_table(tmp_path / "out", columns=["id", "completion"]).to_pydict()
    assert found == {"id": list(range(10)), "completion": [f"echo:{row}" for row in rows]}
    assert leftovers(workers.redis, "bulk") == []


def test_a_worker_that_loads_is_listed_as_that_for_as_long_as_it_may_take_and_a_signal_ends_it_at_once(
    workers: Workers, tmp_path: Path
) -> None:
    loading = tmp_path / "loading"
    slow = "tests.worker.slow_files.SlowLoadingWorker"
    process = workers.start("--with-scheduler", worker_class=slow, LOADING=str(loading))
    wait_until(loading.exists)
    [name] = worker_names(workers.redis)
    workers.redis.expire(
        f"tokenmill:worker:{name}", WORKER_STATS_TTL_S - 300
    )  # as it is after 300 s
    [seen] = [each.sample for each in read_workers(workers.redis) if each.sample]
    assert (seen.name, seen.state, seen.queues, seen.is_silent) == (
        name,
        "loading",
        ["high", "bulk"],
        False,
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert worker_names(workers.redis) == []


@pytest.mark.usefixtures("new_interpreters")
def test_a_signal_while_the_worker_imports_its_own_modules_ends_it_at_once(
    workers: Workers,
) -> None:
    process = workers.start(worker_class="tests.worker.slow_files.SignalledWhileImporting")
    assert process.wait(timeout=60) == 0, workers.log(process)


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


def test_max_jobs_is_kept_also_when_many_wait(workers: Workers) -> None:
    jobs = [
        workers.queue("bulk").enqueue("jobs.complete", f"p{i}", max_tokens=2) for i in range(20)
    ]
    process = workers.start("--max-jobs", "7")
    assert process.wait(timeout=60) == 0
    assert [job.get_status() for job in jobs] == [JobStatus.FINISHED] * 7 + [JobStatus.QUEUED] * 13


def test_max_idle_time_ends_an_idle_worker(workers: Workers) -> None:
    process = workers.start("--max-idle-time", "1")
    assert process.wait(timeout=60) == 0
    assert "idle for 1 seconds" in workers.log(process)
