"""A fault of the worker's own surroundings is held against the worker, not against the jobs that met it."""

import errno
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq import Retry
from rq.job import Job, JobStatus

from jobs.errors import DiskFull
from tests.rq_workers import Workers, leftovers
from worker.io_thread.faults import WorkerFaults, is_fault
from worker.store.records.claimed_job import ClaimedJob

F = "tests.worker.functions."
FAULTY = "tests.worker.faulty_worker.FaultyWorker"


def submit(workers: Workers, folder: Path, **options: Any) -> Job:
    """Enqueue the planning of a run of four shards."""
    pq.write_table(pa.table({"prompt": ["a", "b", "c", "d"]}), folder / "in.parquet")
    arguments = (str(folder / "in.parquet"), str(folder / "out"))
    return workers.queue("bulk").enqueue(
        "jobs.score_parquet", *arguments, rows_per_shard=1, **options
    )


def meet_a_fault(workers: Workers, fault: str, step: str, **env: str) -> str:
    """Run a faulty worker until it leaves; return its log."""
    worker = workers.start(worker_class=FAULTY, FAULT=fault, FAULTY_STEP=step, **env)
    assert worker.wait(timeout=60) == 1
    return workers.log(worker)


@pytest.mark.parametrize(
    ("step", "fault", "reason"),
    [
        ("open", "import", "ImportError: cannot import name 'pq'"),
        pytest.param("open", "descriptors", "Too many open files", marks=pytest.mark.long),
        pytest.param("result", "memory", "MemoryError", marks=pytest.mark.long),
        ("result", "disk", "No space left on device"),
        ("plan", "descriptors", "Too many open files"),
    ],
)
def test_a_worker_at_fault_gives_back_its_jobs_and_leaves_with_the_reason(
    workers: Workers, tmp_path: Path, step: str, fault: str, reason: str
) -> None:
    planning = submit(workers, tmp_path)
    if step != "plan":
        workers.burst("--max-jobs", "1")
        assert planning.get_status() == JobStatus.FINISHED
    log = meet_a_fault(workers, fault, step)
    assert "consecutive faults of this worker itself, not of its jobs" in log
    assert reason in log
    waiting = workers.queue("bulk").jobs
    assert [job.get_status() for job in waiting] == [JobStatus.QUEUED] * (
        1 if step == "plan" else 4
    )
    assert leftovers(workers.redis, "bulk") == []
    workers.burst()
    table = pq.read_table(tmp_path / "out")
    assert table["completion"].to_pylist() == ["echo:a", "echo:b", "echo:c", "echo:d"]
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_a_job_that_meets_a_fault_on_every_worker_is_set_aside_with_the_reason(
    workers: Workers, tmp_path: Path
) -> None:
    planning = submit(workers, tmp_path, retry=Retry(max=9))
    meet_a_fault(workers, "memory", "plan", TOKENMILL_MAX_WORKER_DEATHS="2")
    workers.burst(
        worker_class=FAULTY, FAULT="memory", FAULTY_STEP="plan", TOKENMILL_MAX_WORKER_DEATHS="2"
    )
    assert planning.get_status() == JobStatus.FAILED
    reason = workers.result(planning).exc_string or ""
    assert (
        "2 workers died while they ran this job, or met a fault; the last fault was MemoryError"
        in reason
    )
    assert leftovers(workers.redis, "bulk") == []


def test_what_a_users_function_lacks_fails_its_job_as_in_rq(workers: Workers) -> None:
    queue = workers.queue("bulk")
    jobs = [queue.enqueue(F + "lack", kind) for kind in ("import", "memory", "descriptors") * 2]
    last = queue.enqueue(F + "add", 1, 2)
    workers.burst()
    assert [job.get_status() for job in jobs] == [JobStatus.FAILED] * 6
    assert workers.result(last).return_value == 3


def test_a_jobs_first_fault_counts_against_it_and_its_second_in_a_row_may_be_the_workers() -> None:
    faults = WorkerFaults()
    shard, function = ClaimedJob("shard", "e", "bulk", "w"), "jobs.score_shard"
    assert faults.note(shard, function, MemoryError()).counts_against_job
    assert not faults.note(shard, function, MemoryError()).counts_against_job, (
        "twice in a row: that may be this worker"
    )
    faults.note_success("jobs.complete")
    assert faults.num_in_a_row == 2, "a prompt needs none of what a shard lacks"
    faults.note_success(function)
    assert faults.num_in_a_row == 0
    assert faults.note(shard, function, MemoryError()).counts_against_job, "others end well here"
    assert [fault.claimed for fault in faults.waiting] == [shard] * 3


def test_a_full_disk_below_a_runs_output_is_the_runs_own_matter() -> None:
    assert is_fault(OSError(errno.ENOSPC, "No space left on device"))
    assert is_fault(ModuleNotFoundError("No module named 'pyarrow'"))
    assert not is_fault(DiskFull("/out/part-00000.parquet", "No space left on device"))
    assert not is_fault(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    assert not is_fault(ConnectionError("Redis is gone"))
