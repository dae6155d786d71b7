"""A job's time begins when its first sequence is scheduled or its function begins, not while it waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from rq import Callback, Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from engine import SamplingParams
from jobs.context.served_model import ServedModel
from tests.rq_workers import Workers, leftovers, wait_until, wait_until_started
from tests.worker.fake_engine import FakeEngine
from worker.engine_thread.engine_loop import EngineLoop
from worker.engine_thread.orders import Stepped
from worker.io_thread.held.admission import Admission
from worker.io_thread.held.packing import Packer
from worker.io_thread.held.payload_budget import PayloadBudget
from worker.io_thread.job_runner import JobRunner
from worker.job_environment import JobEnvironment
from worker.metrics.tally import Tally
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import Wanted
from worker.store.user_code import Callbacks
from worker.store.webhooks import Webhooks
from worker.threads.functions import FunctionPool

F = "tests.worker.functions."
ALLOWED = {"jobs.complete", F + "add", F + "own_state", F + "on_success_state"}


class ByHand:
    """The parts of a worker, driven turn by turn in one thread; its clock stands still unless moved."""

    def __init__(self, redis: Redis, slots: int) -> None:
        self.moment = 1000.0
        self.redis, self.store = redis, JobStore(redis, "w", lease_s=600)
        self.orders: SimpleQueue[Any] = SimpleQueue()
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.packer = Packer(1, slots, prefetch=32, max_functions=2, max_files=2)
        self.engine = EngineLoop(FakeEngine(slots, 0.0), self.orders, self.events.put, lambda: self.moment)
        self.pools = [FunctionPool(1, name) for name in ("functions", "ends", "webhooks")]
        functions, enders, webhooks = self.pools
        log = logging.getLogger("by hand")
        self.runner = JobRunner(
            packer=self.packer,
            budget=PayloadBudget(1, 1 << 26),
            admission=Admission(ALLOWED),
            environment=JobEnvironment((), ServedModel("m", "f", "d"), SamplingParams.from_mapping),
            orders=self.orders,
            functions=functions,
            enders=enders,
            pool_client=redis,
            user_client=redis,
            callbacks=Callbacks([], redis, redis, Webhooks(webhooks, (), log)),
            ends_store=self.store,
            post=self.events.put,
            tally=Tally(),
            log=log,
            clock=lambda: self.moment,
        )

    def claim(self) -> None:
        wanted = Wanted("bulk", 100, uuid4().hex[:24], takes_suspects=True, max_functions=2)
        for claimed in self.store.claim([wanted], float("inf"))[0].jobs:
            self.runner.begin(claimed, 0)
        self.runner.open_claimed()
        self.runner.show_begun(self.store)

    def turn(self) -> None:
        """Send the engine what it has room for, step it, and write what came of it."""
        self.runner.feed()
        if not self.orders.empty() or self.engine._engine.has_unfinished:
            self.engine.turn()
        self.take_events()

    def take_events(self, wait_s: float = 0.0) -> None:
        try:
            event = self.events.get(timeout=wait_s) if wait_s else self.events.get_nowait()
            while True:
                if isinstance(event, Stepped):
                    self.runner.streams.started(event.started, event.at)
                    self.runner.streams.deliver(event.completions, event.at)
                else:
                    event()
                event = self.events.get_nowait()
        except Empty:
            pass
        self.runner.feed()
        self.runner.flush(self.store)
        self.runner.show_begun(self.store)

    def run_out(self) -> None:
        while self.runner.num_held:
            self.turn()
            self.take_events(0.01)

    def close(self) -> None:
        self.runner.threads.close(10)


@pytest.fixture
def bulk(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer)


@pytest.fixture
def worker(redis: Redis) -> Iterator[ByHand]:
    by_hand = ByHand(redis, slots=2)
    yield by_hand
    by_hand.close()


def statuses(jobs: list[Job]) -> set[JobStatus]:
    return {job.get_status() for job in jobs}


def test_jobs_that_wait_behind_a_batch_do_not_use_up_their_timeouts(
    redis: Redis, bulk: Queue, worker: ByHand, tmp_path: Path
) -> None:
    slow = [bulk.enqueue("jobs.complete", f"file:{tmp_path}/go", job_timeout=-1) for _ in range(2)]
    waiting = [bulk.enqueue("jobs.complete", "a", max_tokens=2, job_timeout=3) for _ in range(30)]
    worker.claim()
    worker.turn()
    for _ in range(5):
        worker.moment += 60
        worker.turn()
        worker.runner.check_deadlines()
    assert statuses(slow) == {JobStatus.STARTED}
    assert statuses(waiting) == {JobStatus.QUEUED}
    assert sorted(bulk.started_job_registry.get_job_ids()) == sorted(job.id for job in slow)
    assert worker.store.renew(worker.runner.held) == []
    for job in waiting:
        job.refresh()
        assert (job.started_at, job.worker_name, job.last_heartbeat) == (None, None, None)
    (tmp_path / "go").touch()
    worker.run_out()
    assert statuses(slow + waiting) == {JobStatus.FINISHED}
    for job in waiting:
        job.refresh()
        assert job.started_at is not None
        assert job.ended_at is not None
        assert (job.ended_at - job.started_at).total_seconds() < 60
    assert float(redis.hget("rq:worker:w", "total_working_time") or 0) == 2 * 300
    assert leftovers(redis, "bulk") == []


def test_a_timeout_counts_from_the_first_sequence_on_also_while_it_is_preempted(
    redis: Redis, bulk: Queue, worker: ByHand
) -> None:
    job = bulk.enqueue("jobs.complete", "hang", job_timeout=3)
    worker.claim()
    worker.turn()
    worker.moment += 2
    worker.runner.streams.started(["0.0"], worker.moment)  # scheduled once more
    worker.runner.check_deadlines()
    worker.moment += 2
    worker.runner.check_deadlines()
    worker.run_out()
    assert job.get_status() == JobStatus.FAILED
    assert "timeout value (3 seconds)" in str(job.latest_result().exc_string)  # type: ignore[union-attr]


def test_a_refused_request_begins_and_ends_at_once(redis: Redis, bulk: Queue, worker: ByHand) -> None:
    job = bulk.enqueue("jobs.complete", "refuse")
    worker.claim()
    worker.run_out()
    job.refresh()
    assert job.get_status() == JobStatus.FAILED
    assert job.started_at is not None
    assert job.worker_name == "w"


def test_a_claimed_job_that_is_cancelled_before_it_begins_never_runs(
    redis: Redis, bulk: Queue, worker: ByHand
) -> None:
    for _ in range(2):
        bulk.enqueue("jobs.complete", "hang")
    job = bulk.enqueue("jobs.complete", "a", max_tokens=1)
    worker.claim()
    worker.turn()
    job.cancel()
    worker.runner.drop(worker.store.renew(worker.runner.held))
    worker.turn()
    assert worker.runner.num_held == 2
    assert worker.engine._engine.stats().num_waiting == 0
    assert job.get_status() == JobStatus.CANCELED
    assert [each for each in leftovers(redis, "bulk") if job.id in each] == []


def test_what_has_not_begun_is_given_back_and_what_has_goes_on(
    redis: Redis, bulk: Queue, worker: ByHand
) -> None:
    running = [bulk.enqueue("jobs.complete", "hang") for _ in range(2)]
    waiting = [bulk.enqueue("jobs.complete", "a") for _ in range(3)]
    worker.claim()
    worker.turn()
    assert worker.store.release(worker.runner.withdraw_unstarted(), "given_back", 5) == []
    assert bulk.job_ids == [job.id for job in waiting]
    assert worker.runner.num_held == len(running)
    assert worker.store.renew(worker.runner.held) == []


def test_a_function_is_shown_as_started_before_it_runs(redis: Redis, bulk: Queue, worker: ByHand) -> None:
    """Its own copy of the job and Redis tell it the same as on RQ's own worker."""
    job = bulk.enqueue(F + "own_state")
    worker.claim()
    worker.run_out()
    state = ["started", True, "w", 1]
    assert job.latest_result().return_value == [state, state]  # type: ignore[union-attr]


def test_a_callback_finds_its_job_started_also_where_that_took_one_step(
    redis: Redis, bulk: Queue, worker: ByHand
) -> None:
    hook = Callback(F + "on_success_state")
    job = bulk.enqueue("jobs.complete", "a", max_tokens=1, on_success=hook)
    worker.claim()
    worker.run_out()
    assert redis.lrange("states", 0, -1) == [b"started True w 1"]
    assert job.get_status() == JobStatus.FINISHED


def test_functions_that_are_no_longer_ours_are_not_run_and_free_their_places(
    redis: Redis, bulk: Queue, worker: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [bulk.enqueue(F + "add", 1, 1) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(JobRunner, "show_begun", lambda *_: None)
        worker.claim()
    assert worker.packer.free_functions == 0
    jobs[0].cancel()
    worker.runner.show_begun(worker.store)
    worker.run_out()
    assert worker.packer.free_functions == 2
    assert [job.get_status() for job in jobs] == [JobStatus.CANCELED, JobStatus.FINISHED]


def test_rq_info_counts_as_executing_what_runs_and_a_dead_worker_loses_nothing_that_waited(
    workers: Workers,
) -> None:
    queue = workers.queue("bulk")
    runs = queue.enqueue("jobs.complete", "hang")
    waiting = [queue.enqueue("jobs.complete", "hang") for _ in range(3)]
    process = workers.start("--name", "w", TOKENMILL_MAX_NUM_SEQS="1")
    wait_until_started(runs)
    wait_until(lambda: workers.redis.hlen("tokenmill:held:bulk") == 4)
    assert statuses(waiting) == {JobStatus.QUEUED}
    assert "queue bulk 0, 1 executing" in workers.rq("info", "--raw", "-Q", "bulk")
    process.kill()
    process.wait()
    other = JobStore(workers.redis, "other", lease_s=2)
    wait_until(lambda: not list(workers.redis.scan_iter("rq:execution:*")))
    assert other.reclaim_abandoned(["bulk"], 1.0, max_deaths=5) == []
    assert sorted(queue.job_ids) == sorted([runs.id, *(job.id for job in waiting)])
    assert leftovers(workers.redis, "bulk") == []
