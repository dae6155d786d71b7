"""What RQ promises for one job at a time holds for every job of a batch."""

import json
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Callback, Queue, Retry, Worker
from rq.command import send_stop_job_command
from rq.group import Group
from rq.job import JobStatus
from rq.registry import FinishedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker.base import WorkerStatus

from jobs.common.workers import read_workers
from tests.rq_workers import Workers, leftovers, stats_of, text_of, wait_until, wait_until_started
from tokenmill.dashboard.seen.growth import read_points
from worker import BatchWorker
from worker.store.scheduler import Scheduler

F = "tests.worker.functions."


def test_jobs_of_one_batch_each_get_their_own_answer_and_leave_nothing_behind(
    workers: Workers,
) -> None:
    queue = workers.queue("bulk")
    jobs = [queue.enqueue("jobs.complete", f"p{i}", max_tokens=1 + i % 7) for i in range(200)]
    workers.burst("--name", "w")
    for i, job in enumerate(jobs):
        result = workers.result(job)
        assert text_of(result) == f"echo:p{i}"
        assert result.return_value["usage"]["completion_tokens"] == 1 + i % 7
        assert result.worker_name == "w"
        assert job.get_status() == JobStatus.FINISHED
    assert leftovers(workers.redis, "bulk") == []
    finished = FinishedJobRegistry("bulk", connection=workers.redis, serializer=JSONSerializer)
    assert sorted(finished.get_job_ids()) == sorted(job.id for job in jobs)
    stats = stats_of(workers, "w")
    assert stats["max_running"] >= 32
    assert stats["jobs_finished"] == 200
    [sample] = [each.sample for each in read_workers(workers.redis, ["w"]) if each.sample]
    assert (sample.state, sample.queues, sample.held) == ("stopped", ["high", "bulk"], {})
    assert (sample.model, sample.dtype, sample.max_num_seqs) == ("fake", "auto", 64)
    first, last = (read_points(workers.redis, ["w"])["w"][place] for place in (0, -1))
    assert first.depth == {"high": 0, "bulk": 200 - first.jobs_held - first.jobs_finished}
    assert (last.depth, last.jobs_finished) == ({"high": 0, "bulk": 0}, 200)
    assert (last.ended, last.ended_badly) == ({"bulk": 200}, {})
    assert last.waited_ms["bulk"] > 0
    assert last.ran_ms["bulk"] > 0


def test_every_step_of_a_job_has_rqs_status_and_registry(workers: Workers, tmp_path: Path) -> None:
    gate, queue = f"file:{tmp_path}/go", workers.queue("bulk")
    runs, fails = queue.enqueue("jobs.complete", gate), queue.enqueue("jobs.complete", "refuse")
    waits = queue.enqueue("jobs.complete", "a", max_tokens=1, depends_on=runs)
    later = queue.enqueue_in(timedelta(hours=1), "jobs.complete", "a")
    assert [job.get_status() for job in (runs, waits, later)] == ["queued", "deferred", "scheduled"]
    process = workers.start("--name", "w")
    workers.result(fails)
    wait_until_started(runs)
    runs.refresh()
    assert runs.worker_name == "w"
    assert runs.started_at is not None
    assert runs.ended_at is None
    assert queue.started_job_registry.get_job_ids() == [runs.id]
    assert [execution.job_id for execution in runs.get_executions()] == [runs.id]
    wait_until(lambda: workers.redis.hget("rq:worker:w", "current_job") == runs.id.encode())
    (tmp_path / "go").touch()
    workers.result(waits)
    process.terminate()
    assert process.wait(timeout=60) == 0
    jobs = (runs, waits, fails, later)
    assert [job.get_status() for job in jobs] == ["finished", "finished", "failed", "scheduled"]
    assert queue.finished_job_registry.get_job_ids() == [runs.id, waits.id]
    assert queue.failed_job_registry.get_job_ids() == [fails.id]
    assert queue.scheduled_job_registry.get_job_ids() == [later.id]
    assert queue.deferred_job_registry.get_job_ids() == []
    assert queue.job_ids == []
    shown = workers.rq("info", "--raw", "-Q", "bulk")
    assert "queue bulk 0, 0 executing, 2 finished, 1 failed" in shown


def test_stop_job_ends_one_of_many_also_where_its_callback_raises(workers: Workers) -> None:
    queue = workers.queue("bulk")
    hook = Callback(F + "on_stopped_raises")
    plain, hang, other = (
        queue.enqueue("jobs.complete", "hang", on_stopped=each) for each in (None, hook, None)
    )
    workers.start("--name", "w")
    wait_until_started(plain, hang, other)
    for job, told in ((plain, "stopped by user"), (hang, "the stopped callback raised")):
        send_stop_job_command(workers.redis, job.id, serializer=JSONSerializer)
        assert told in (workers.result(job).exc_string or "")
        assert job.get_status() == JobStatus.STOPPED
    assert (workers.result(plain).exc_string or "").splitlines()[-1] == "tokenmill: cancelled"
    assert queue.failed_job_registry.get_job_ids() == [plain.id, hang.id]
    wait_until(lambda: stats_of(workers, "w").get("jobs_held") == 1)
    assert other.get_status() == JobStatus.STARTED
    good = queue.enqueue("jobs.complete", "a", max_tokens=1)
    assert text_of(workers.result(good)) == "echo:a"


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_running_job_that_is_cancelled_or_deleted_is_dropped(workers: Workers, how: str) -> None:
    queue = workers.queue("bulk")
    gone, stays = queue.enqueue("jobs.complete", "hang"), queue.enqueue("jobs.complete", "hang")
    workers.start("--name", "w")
    wait_until_started(gone, stays)
    getattr(workers.job(gone.id), how)()
    wait_until(lambda: stats_of(workers, "w").get("jobs_held") == 1)
    assert [key for key in leftovers(workers.redis, "bulk") if gone.id in key] == []
    assert stays.get_status() == JobStatus.STARTED
    assert workers.redis.exists(gone.key) == (how == "cancel")


def test_scheduled_jobs_are_enqueued_also_where_a_scheduler_died_with_its_locks(
    workers: Workers,
) -> None:
    workers.redis.set("rq:scheduler-lock:bulk", "gone", ex=2)
    job = workers.queue("bulk").enqueue_in(timedelta(seconds=1), "jobs.complete", "a", max_tokens=1)
    process = workers.start("--with-scheduler", PERIODS_S="1")
    assert text_of(workers.result(job)) == "echo:a"
    process.terminate()
    assert process.wait(timeout=60) == 0
    assert workers.redis.keys("rq:scheduler*") == []


def test_a_running_shard_shows_its_progress_in_a_field_of_its_own(
    workers: Workers, tmp_path: Path
) -> None:
    def shown() -> dict[str, int]:
        return dict(
            json.loads(workers.redis.hget(f"rq:job:{run}-00000", "tokenmill_progress") or "{}")
        )

    prompts = ["a", "b", "c", f"file:{tmp_path}/go"]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    plan = workers.queue("bulk").enqueue(
        "jobs.score_parquet", "in.parquet", "out", sampling={"max_tokens": 2}, result_ttl=60
    )
    workers.start("--name", "w")
    run = workers.result(plan).return_value["run"]
    wait_until(lambda: shown().get("rows_done") == 3)
    assert shown()["tokens"] == 6
    wait_until(lambda: shown().get("tokens_open", 0) > 2)
    assert (shown()["prompt_tokens"], shown()["prompt_tokens_open"]) == (3, len(prompts[3])), (
        "the open row moves too"
    )
    (tmp_path / "go").touch()
    wait_until(lambda: (tmp_path / "out" / "_SUCCESS").exists())


def test_a_failure_that_no_other_try_can_mend_uses_up_no_retry(workers: Workers) -> None:
    queue, retry = workers.queue("bulk"), Retry(max=2)
    jobs = [
        queue.enqueue("jobs.complete", "refuse", retry=retry),
        queue.enqueue("jobs.complete", "a", max_tokns=5, retry=retry),
        queue.enqueue("jobs.score_parquet", "no/such.parquet", "out", retry=retry),
    ]
    log = workers.burst()
    for job in jobs:
        job.refresh()
        assert (job.get_status(), job.retries_left) == (JobStatus.FAILED, 2)
        assert (workers.result(job).exc_string or "").splitlines()[-1] == "tokenmill: client"
    assert (
        f"job {jobs[0].id} failed: RequestFailed: request 0 of this job failed: the prompt is empty"
        in log
    )
    assert (
        f"job {jobs[1].id} failed: InvalidJob: 'max_tokns' is no sampling parameter; did you mean"
        in log
    )
    assert f"job {jobs[2].id} failed: InputNotFound: no input file at" in log


def test_a_failure_of_the_servers_is_tried_again_and_classed(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("jobs.complete", "hang", job_timeout=1, retry=Retry(max=1))
    log = workers.burst()
    job.refresh()
    assert (job.get_status(), job.retries_left) == (JobStatus.FAILED, 0)
    assert (workers.result(job).exc_string or "").splitlines()[-1] == "tokenmill: server"
    assert "JobTimeoutException: Task exceeded maximum timeout value (1 seconds)" in log


def test_what_a_users_function_raises_is_neither_classed_nor_logged_in_its_words(
    workers: Workers,
) -> None:
    job = workers.queue("bulk").enqueue(F + "boom", "secret words")
    log = workers.burst()
    assert (workers.result(job).exc_string or "").splitlines()[-1] == "ValueError: secret words"
    assert f"job {job.id} failed: ValueError" in log
    assert "secret words" not in log


def test_groups_are_cleaned_of_jobs_that_are_gone_and_of_empty_groups(workers: Workers) -> None:
    bulk = workers.queue("bulk")
    for name in ("some-gone", "all-gone"):
        Group(workers.redis, name).enqueue_many(
            bulk, [Queue.prepare_data(F + "add", (1, 1), job_id=f"{name}-{n}") for n in range(2)]
        )
    workers.redis.delete("rq:job:some-gone-0", "rq:job:all-gone-0", "rq:job:all-gone-1")
    workers.burst()
    assert workers.redis.smembers("rq:groups") == {b"some-gone"}
    assert workers.redis.smembers("rq:group:some-gone") == {b"some-gone-1"}


def test_a_burst_in_which_the_scheduler_raises_keeps_none_of_its_locks(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(scheduler: Scheduler) -> None:
        assert workers.redis.keys("rq:scheduler*"), "it has none to keep"
        raise RuntimeError("boom")

    monkeypatch.setattr(Scheduler, "enqueue_scheduled_jobs", boom)
    worker = BatchWorker(["bulk"], connection=workers.redis, serializer=JSONSerializer)
    with pytest.raises(RuntimeError, match="boom"):
        worker._start_scheduler(burst=True)
    assert workers.redis.keys("rq:scheduler*") == []


def test_a_worker_whose_connection_is_lost_while_it_signs_on_signs_on_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def subscribe(worker: BatchWorker) -> None:
        tries.append(worker.name)
        if len(tries) == 1:
            raise RedisConnectionError("Connection closed by server.")

    monkeypatch.setattr(BatchWorker, "subscribe", subscribe)
    worker = BatchWorker(["bulk"], connection=workers.redis, serializer=JSONSerializer)
    worker._sign_on("INFO", "", "")
    assert tries == [worker.name] * 2
    assert worker.get_state() == WorkerStatus.STARTED
    assert [other.name for other in Worker.all(workers.redis)] == [worker.name]
