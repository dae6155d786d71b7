"""Functions share the worker's threads, and one that nothing can interrupt costs none of them for long."""

import pytest
from rq import Callback
from rq.job import JobStatus

from tests.rq_workers import Workers, leftovers, stats_of, text_of, wait_until, wait_until_started

F = "tests.worker.functions."


@pytest.mark.parametrize(
    "where",
    ["lock", *(pytest.param(where, marks=pytest.mark.long) for where in ("sleep", "socket"))],
)
def test_functions_that_hang_in_c_fail_at_their_timeout_and_close_the_lane_for_nobody(
    workers: Workers, where: str
) -> None:
    queue = workers.queue("bulk")
    hanging = [queue.enqueue(F + "hang_in_c", where, job_timeout=1) for _ in range(4)]
    workers.start("--name", "w", TOKENMILL_FUNCTION_THREADS="2", TOKENMILL_FUNCTION_GRACE_S="0.1")
    for job in hanging:
        assert "JobTimeoutException" in str(workers.result(job).exc_string)
    assert workers.result(queue.enqueue(F + "add", 1, 2)).return_value == 3
    assert text_of(workers.result(queue.enqueue("jobs.complete", "a", max_tokens=1))) == "echo:a"
    wait_until(lambda: stats_of(workers, "w").get("stuck_threads") == 4)
    assert "in hang_in_c (functions.py:" in workers.log(workers.processes[0])


def test_a_stopped_function_that_hangs_gives_its_place_back(workers: Workers) -> None:
    from rq.command import send_stop_job_command
    from rq.serializers import JSONSerializer

    queue = workers.queue("bulk")
    hanging = queue.enqueue(F + "hang_in_c", "sleep")
    workers.start(TOKENMILL_FUNCTION_THREADS="1", TOKENMILL_FUNCTION_GRACE_S="0.1")
    wait_until_started(hanging)
    send_stop_job_command(workers.redis, hanging.id, serializer=JSONSerializer)
    assert workers.result(queue.enqueue(F + "add", 1, 2)).return_value == 3
    assert hanging.get_status() == JobStatus.STOPPED


def test_a_callback_that_hangs_in_c_holds_up_no_other_end(workers: Workers) -> None:
    queue = workers.queue("bulk")
    hanging = queue.enqueue(
        "jobs.complete", "a", max_tokens=1, on_success=Callback(F + "hang_on_success", timeout=1)
    )
    workers.start(TOKENMILL_FUNCTION_THREADS="1", TOKENMILL_FUNCTION_GRACE_S="0.1")
    good = queue.enqueue("jobs.complete", "b", max_tokens=1, on_success=Callback(F + "on_success"))
    assert text_of(workers.result(good)) == "echo:b"
    assert "JobTimeoutException" in str(workers.result(hanging).exc_string)


def test_a_worker_with_too_many_stuck_threads_gives_back_what_it_holds_and_exits_with_the_reason(
    workers: Workers,
) -> None:
    queue = workers.queue("bulk")
    held = queue.enqueue("jobs.complete", "hang")
    hanging = queue.enqueue(F + "hang_in_c", "sleep", job_timeout=1)
    process = workers.start(TOKENMILL_FUNCTION_GRACE_S="0.1", TOKENMILL_MAX_STUCK_THREADS="0")
    assert process.wait(timeout=60) == 1
    assert "TOKENMILL_MAX_STUCK_THREADS=0" in workers.log(process)
    assert hanging.get_status() in (JobStatus.FAILED, JobStatus.QUEUED)
    assert held.get_status() == JobStatus.QUEUED
    assert leftovers(workers.redis, "bulk") == []


def test_a_worker_holds_no_more_functions_than_it_runs(workers: Workers) -> None:
    jobs = [workers.queue(name).enqueue(F + "meet", "gate") for name in ("high", "bulk") * 3]
    for name in ("w1", "w2"):
        workers.start("--name", name, TOKENMILL_FUNCTION_THREADS="1")
    met = {workers.wait_for("gate:waiting") for _ in range(2)}
    wait_until(lambda: sum(len(workers.queue(name).job_ids) for name in ("high", "bulk")) == 4)
    assert len(met) == 2, "a function was held back by a worker that did not run it"
    workers.redis.rpush("gate", *("go" for _ in jobs))
    for job in jobs:
        workers.result(job)
