"""Functions share the worker's threads, and one that nothing can interrupt costs none of them for long."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest
from rq import Callback
from rq.job import JobStatus
from rq.timeouts import JobTimeoutException

from tests.rq_workers import ROOT, Workers, leftovers, stats_of, text_of, wait_until, wait_until_started
from worker.store.records.timeouts import ThreadDeathPenalty, timeout_error
from worker.threads.functions import FunctionPool, JobStopped

F = "tests.worker.functions."


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def thread_named(name: str) -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == name)


class Hanging:
    """A function that nothing can interrupt until it is let go, and what its pool reported of it."""

    def __init__(self) -> None:
        self.began, self.go, self.reports = threading.Event(), threading.Lock(), SimpleQueue[Any]()
        self.go.acquire()

    def __call__(self) -> str:
        self.began.set()
        self.go.acquire()
        return "too late"

    def done(self, value: Any, error: BaseException | None) -> None:
        self.reports.put((value, error))


def test_a_call_that_does_not_heed_its_interrupt_is_reported_and_its_thread_replaced() -> None:
    clock, hanging = Clock(), Hanging()
    pool = FunctionPool(1, "test", clock)
    call = pool.submit(hanging, hanging.done)
    assert hanging.began.wait(10)
    call.interrupt(timeout_error(3))
    clock.now = 5.0
    assert pool.give_up_stuck(5) == []
    clock.now = 5.1
    [place] = pool.give_up_stuck(5)
    assert "test-0" in place
    assert "test_function_threads.py" in place
    value, error = hanging.reports.get(timeout=10)
    assert value is None
    assert isinstance(error, JobTimeoutException)
    assert "3 seconds" in str(error)
    assert pool.give_up_stuck(5) == []
    assert pool.num_stuck == 1

    ran = SimpleQueue[str]()
    pool.submit(lambda: ran.put(threading.current_thread().name), lambda value, error: None)
    assert ran.get(timeout=10) == "test-1"
    hanging.go.release()
    pool.close(10)


def test_a_stuck_thread_that_ends_is_counted_no_more_and_takes_no_other_call() -> None:
    clock, hanging = Clock(), Hanging()
    pool = FunctionPool(1, "ends", clock)
    call = pool.submit(hanging, hanging.done)
    assert hanging.began.wait(10)
    stuck = thread_named("ends-0")
    call.interrupt(JobStopped)
    clock.now = 1.0
    pool.give_up_stuck(0)
    hanging.go.release()
    stuck.join(10)
    assert not stuck.is_alive()
    assert pool.num_stuck == 0
    assert hanging.reports.qsize() == 1, "the call was reported twice"
    pool.close(10)


def test_a_function_that_swallows_its_timeout_is_ended_when_it_is_given_up() -> None:
    clock, began, reports = Clock(), threading.Event(), SimpleQueue[Any]()

    def swallow() -> None:
        while True:
            try:
                began.set()
                while True:
                    began.is_set()
            except Exception:  # noqa: BLE001  # as a loop that tries again does
                continue

    pool = FunctionPool(1, "swallows", clock)
    thread = thread_named("swallows-0")
    call = pool.submit(swallow, lambda value, error: reports.put(error))
    assert began.wait(10)
    call.interrupt(timeout_error(1))
    clock.now = 1.0
    pool.give_up_stuck(0)
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(reports.get(timeout=10), JobTimeoutException)
    pool.close(10)


def test_a_call_that_goes_on_after_its_callback_has_heeded_a_limit_keeps_its_thread() -> None:
    clock, hanging = Clock(), Hanging()
    pool = FunctionPool(1, "test", clock)

    def call_back() -> str:
        with suppress(JobTimeoutException), ThreadDeathPenalty(1, JobTimeoutException):
            while True:
                threading.Event().wait(0.001)
        return hanging()

    pool.submit(call_back, hanging.done)
    assert hanging.began.wait(30)
    clock.now = 60.0
    assert pool.give_up_stuck(5) == []
    hanging.go.release()
    assert hanging.reports.get(timeout=10) == ("too late", None)
    pool.close(10)


@pytest.mark.parametrize("where", ["sleep", "lock", "socket"])
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


def test_functions_keep_no_prompt_of_their_lane_waiting(workers: Workers) -> None:
    queue = workers.queue("bulk")
    functions = [queue.enqueue(F + "meet", "gate") for _ in range(120)]
    prompt = queue.enqueue("jobs.complete", "a", max_tokens=1)
    workers.start(TOKENMILL_FUNCTION_THREADS="1")
    assert text_of(workers.result(prompt)) == "echo:a"
    late = queue.enqueue("jobs.complete", "b", max_tokens=1)
    assert text_of(workers.result(late)) == "echo:b"
    assert queue.job_ids == [job.id for job in functions[1:]]


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


THREE_TIMES = """
import os, threading
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from tests.worker.fake_engine import FakeEngineWorker

redis = Redis.from_url(os.environ["RQ_REDIS_URL"])
for number in range(3):
    queue = Queue("bulk", connection=redis, serializer=JSONSerializer)
    queue.enqueue("jobs.complete", "a", max_tokens=1)
    queue.enqueue("tests.worker.functions.add", 1, 2)
    worker = FakeEngineWorker(["bulk"], connection=redis, serializer=JSONSerializer, name=f"w{number}")
    worker.work(burst=True)
    print("threads", *(thread.name for thread in threading.enumerate()))
"""


def test_a_worker_that_has_worked_leaves_no_thread_behind(workers: Workers) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", THREE_TIMES],
        env=workers.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    lines = [line for line in shown.splitlines() if line.startswith("threads")]
    assert lines == ["threads MainThread"] * 3
