"""A file that is slow, or hangs with its mount, costs its own place: nothing else waits for it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq.job import JobStatus

from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.context.shared_files import NoRoomYet, ShardBytes, SharedFiles
from jobs.parquet.files.local_files import LocalFiles
from jobs.parquet.shards.shard_work import ShardWork
from jobs.runs.plans.names import shard_job_id
from jobs.table import task_of
from jobs.tasks import Completion, OpenTask, Request, Task
from tests.jobs.answering import MODEL, queued_jobs, score_parquet
from tests.rq_workers import Workers, leftovers, stats_of, text_of, wait_until
from tests.slow_files import slow
from tests.worker.guards import open_guard
from worker.errors import FileTimeout
from worker.io_thread.held.held_jobs import SLOW_S, HeldJob
from worker.io_thread.held.packing import Packer
from worker.io_thread.pool_calls import MAX_OPENING, THREADS, TRY_AGAIN_S, PoolCalls, TaskFiles
from worker.settings import WorkerSettings
from worker.threads.functions import JobStopped
from worker.threads.interrupts import check_interrupted

LIMIT_S, GRACE_S = 60.0, 5.0
WORKER = "tests.worker.slow_files.HangingFilesWorker"


class Hang:
    """Blocks a thread where nothing can interrupt it, until it is let go."""

    def __init__(self) -> None:
        self.began, self._held = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self) -> None:
        self.began.release()
        self._held.acquire()

    def let_go(self, threads: int) -> None:
        self._held.release(threads)


class FileTask(Task):
    """Opened by what the test says."""

    blocking = True

    def __init__(self, opening: Callable[[], Any] = lambda: None) -> None:
        self.opening, self.closed = opening, threading.Event()

    def open(self, context: JobContext) -> OpenFile:
        self.opening()
        return OpenFile(self.closed)


class OpenFile(OpenTask):
    def __init__(self, closed: threading.Event) -> None:
        self.closed = closed

    def requests(self) -> Iterator[Request]:
        return iter(())

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        raise AssertionError

    def result(self) -> Any:
        raise AssertionError

    def close(self) -> None:
        self.closed.set()


class Files:
    """TaskFiles with a clock that moves when told to, and what they report."""

    def __init__(self) -> None:
        self.now = 0.0
        self.packer = Packer(1, 8, 4, 4, MAX_OPENING)
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.reports: list[tuple[int, Any, BaseException | None]] = []
        log = logging.getLogger("files")
        self.calls = PoolCalls(self._events.put, lambda job: None, open_guard(), log, self._clock)
        self.files = TaskFiles(self.packer, self.calls, LIMIT_S, log, self._clock)
        self._numbers = iter(range(100))

    def _clock(self) -> float:
        return self.now

    def open(self, task: Task, context: JobContext | None = None) -> HeldJob:
        job = HeldJob(next(self._numbers), cast(Any, SimpleNamespace(job_id="a")), 0, is_file=True)
        self.files.open(job, task, cast(Any, context), self.note)
        return job

    def note(self, job: HeldJob, value: Any, error: BaseException | None) -> None:
        self.reports.append((job.number, value, error))

    def wait_for_reports(self, number: int) -> None:
        while len(self.reports) < number:
            self._events.get(timeout=30)()

    def try_until(self, reports: int) -> None:
        """Try again, once nothing runs any more, until there are so many reports."""
        for _ in range(30):
            with suppress(Empty):
                while len(self.reports) < reports:
                    self._events.get(timeout=0.5)()
            if len(self.reports) >= reports:
                return
            self.now += TRY_AGAIN_S
            self.calls.try_again()
        pytest.fail(f"{self.reports} are all reports after 30 tries")

    def pass_time(self, seconds: float) -> list[str]:
        self.now += seconds
        self.files.check()
        return [place for pool in self.files.pools for place in pool.give_up_stuck(GRACE_S)]

    @property
    def num_stuck(self) -> int:
        return sum(pool.num_stuck for pool in self.files.pools)


@pytest.fixture
def files() -> Iterator[Files]:
    others = set(threading.enumerate())
    files = Files()
    yield files
    for pool in files.files.pools:
        pool.close(30)
    wait_until(
        lambda: set(threading.enumerate()) <= others
    )  # join leaves those out that were given up


def num_threads(kind: str) -> int:
    return sum(thread.name.startswith(f"tokenmill-{kind}-") for thread in threading.enumerate())


def test_a_slow_file_holds_up_no_other_and_never_are_there_more_threads_than_the_bound(
    files: Files,
) -> None:
    hang = Hang()
    for held in range(1, MAX_OPENING):
        files.open(FileTask(hang))
        assert hang.began.acquire(timeout=30)
        assert files.packer.claimable_files(0) == 0
        files.pass_time(SLOW_S + 1)
        assert files.packer.claimable_files(0) == MAX_OPENING - held
        files.open(FileTask())
        files.wait_for_reports(held)
    assert num_threads("files") == MAX_OPENING
    files.open(FileTask(hang))
    assert hang.began.acquire(timeout=30)
    files.pass_time(SLOW_S + 1)
    assert files.packer.claimable_files(0) == 0
    assert num_threads("files") == MAX_OPENING
    hang.let_go(MAX_OPENING)
    files.wait_for_reports(2 * MAX_OPENING - 1)
    assert [error for _, _, error in files.reports] == [None] * len(files.reports)
    assert files.packer.claimable_files(0) == MAX_OPENING
    wait_until(lambda: num_threads("files") == THREADS)


def test_files_that_hang_fail_by_name_at_their_limit_and_are_closed_when_they_thaw(
    files: Files,
) -> None:
    hang = Hang()
    tasks = [FileTask(hang) for _ in range(MAX_OPENING)]
    for task in tasks:
        files.open(task)
    for _ in range(MAX_OPENING // THREADS):
        for _ in range(THREADS):
            assert hang.began.acquire(timeout=30)
        assert files.pass_time(SLOW_S + 1) == []
    assert files.pass_time(LIMIT_S) == []
    assert len(files.pass_time(GRACE_S + 1)) == MAX_OPENING
    assert files.num_stuck == MAX_OPENING
    files.wait_for_reports(MAX_OPENING)
    for _, _, error in files.reports:
        assert isinstance(error, FileTimeout)
        assert "opening its file went on for more than 60 s (TOKENMILL_FILE_TIMEOUT_S)" in str(
            error
        )
    assert files.packer.claimable_files(0) == MAX_OPENING

    files.open(FileTask())
    files.wait_for_reports(MAX_OPENING + 1)
    assert not any(task.closed.is_set() for task in tasks)
    hang.let_go(MAX_OPENING)
    assert all(task.closed.wait(30) for task in tasks), (
        "opened by a thread that was given up, and left open"
    )
    wait_until(lambda: files.num_stuck == 0)


def test_a_file_that_takes_long_and_gives_signs_of_life_is_opened(files: Files) -> None:
    asked, goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def reading() -> None:
        for _ in range(4):
            check_interrupted()
            asked.release()
            goes_on.acquire()

    files.open(FileTask(reading))
    for _ in range(4):
        assert asked.acquire(timeout=30)
        assert files.pass_time(0.8 * LIMIT_S) == []
        goes_on.release()
    files.wait_for_reports(1)
    assert [error for _, _, error in files.reports] == [None]


Take = Callable[[SharedFiles, Callable[[], bool]], None]


class Turn:
    """Two files that are opened in turn: the first one goes on while the test says so, the second one waits."""

    def __init__(self, files: Files, monkeypatch: pytest.MonkeyPatch, take: Take) -> None:
        monkeypatch.setattr("jobs.context.turns.CHECK_EVERY_S", 0.01)
        shared = (
            WorkerSettings(model="m").job_context(cast(Any, None), MODEL, cast(Any, None)).files
        )
        self.files, self.asked, self.goes_on = files, threading.Semaphore(0), threading.Semaphore(0)
        self.ends = False

        def go_on() -> bool:
            while not self.ends:
                check_interrupted()
                self.asked.release()
                self.goes_on.acquire()
            return True

        self.holder = files.open(FileTask(lambda: take(shared, go_on)))
        assert self.asked.acquire(timeout=30)
        self.waiter = files.open(FileTask(lambda: take(shared, lambda: True)))
        wait_until(lambda: self.waiter.call is not None and self.waiter.call.running_s == files.now)

    def show_life(self) -> None:
        self.goes_on.release()
        assert self.asked.acquire(timeout=30)
        wait_until(lambda: self.waiter.call is not None and self.waiter.call.silent_s == 0)

    def end(self) -> None:
        self.ends = True
        self.goes_on.release()


def with_reader(shared: SharedFiles, read: Callable[[], bool]) -> None:
    shared.enter("a")
    with shared.reader(
        ("a",), None, lambda: cast(Any, SimpleNamespace(reaches=lambda shard: True, next_row=0))
    ):
        read()


def with_plan(shared: SharedFiles, load: Callable[[], bool]) -> None:
    shared.plan("plan", load)


@pytest.mark.parametrize("take", [with_reader, with_plan])
def test_a_file_that_waits_for_anothers_turn_is_alive_as_long_as_that_one(
    files: Files, monkeypatch: pytest.MonkeyPatch, take: Take
) -> None:
    turn = Turn(files, monkeypatch, take)
    for _ in range(4):
        assert files.pass_time(0.8 * LIMIT_S) == []
        turn.show_life()
    turn.end()
    files.wait_for_reports(2)
    assert [error for *_, error in files.reports] == [None, None]


def test_a_file_that_waits_for_one_that_hangs_fails_with_it(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(files, monkeypatch, with_reader)
    files.pass_time(0.8 * LIMIT_S)
    turn.show_life()
    files.pass_time(LIMIT_S + 1)
    files.wait_for_reports(1)
    assert files.reports[0][0] == turn.waiter.number
    files.pass_time(GRACE_S + 1)
    files.wait_for_reports(2)
    assert [type(error).__mro__[1] for *_, error in files.reports] == [FileTimeout, FileTimeout]
    turn.end()


def test_a_job_that_is_stopped_while_it_waits_for_anothers_turn_leaves_at_once(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(files, monkeypatch, with_reader)
    assert turn.waiter.call is not None
    turn.waiter.call.interrupt(JobStopped)
    files.wait_for_reports(1)
    assert isinstance(files.reports[0][2], JobStopped)
    turn.end()
    files.wait_for_reports(2)


def plan(workers: Workers, folder: Path, name: str, rows: int) -> str:
    """Plan and enqueue a run of one row a shard over a new file; return its id."""
    pq.write_table(
        pa.table({"prompt": [f"{name}{row}" for row in range(rows)]}), folder / f"{name}.parquet"
    )
    model = ServedModel("fake", "fingerprint of fake", "auto")
    roots = (str(folder.resolve()),)
    context = JobContext(workers.redis, "bulk", f"plan-{name}", f"execution-{name}", roots, model)
    return str(
        score_parquet(
            context, str(folder / f"{name}.parquet"), str(folder / name), rows_per_shard=1
        )["run"]
    )


def test_prompts_and_other_files_of_a_lane_go_past_files_that_hang(
    workers: Workers, tmp_path: Path
) -> None:
    stuck = plan(workers, tmp_path, "stuck", rows=3)
    os.mkfifo(tmp_path / "stuck.parquet.hangs")
    plan(workers, tmp_path, "fine", rows=3)
    bulk = workers.queue("bulk")
    prompt = bulk.enqueue("jobs.complete", "a", max_tokens=1)
    waits = {"TOKENMILL_FILE_TIMEOUT_S": "5", "TOKENMILL_FUNCTION_GRACE_S": "0.1"}
    worker = workers.start("--name", "w", queues=("bulk",), worker_class=WORKER, **waits)
    assert text_of(workers.result(prompt)) == "echo:a"
    wait_until((tmp_path / "fine" / "_SUCCESS").exists)
    for shard in range(3):
        job = workers.job(shard_job_id(stuck, shard))
        failure = str(workers.result(job).exc_string)
        assert "FileTimeout: opening its file went on for more than 5 s" in failure
        assert failure.rstrip().endswith("tokenmill: server")
        assert job.get_status() == JobStatus.FAILED
    wait_until(
        lambda: stats_of(workers, "w").get("stuck_threads") == 1
    )  # the others waited for its turn
    assert "shard_work.py" in workers.log(worker) or "open_hanging" in workers.log(worker)
    with (tmp_path / "stuck.parquet.hangs").open("w"):  # the mount is back
        wait_until(lambda: stats_of(workers, "w").get("stuck_threads") == 0)
    assert leftovers(workers.redis, "bulk") == []


def test_a_planning_that_hangs_ends_by_name_whatever_its_own_timeout(
    workers: Workers, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    os.mkfifo(tmp_path / "in.parquet.hangs")
    bulk = workers.queue("bulk")
    paths = (str(tmp_path / "in.parquet"), str(tmp_path / "out"))
    planning = bulk.enqueue("jobs.score_parquet", *paths, job_timeout=-1)
    waits = {"TOKENMILL_FILE_TIMEOUT_S": "3", "TOKENMILL_FUNCTION_GRACE_S": "0.1"}
    workers.start(worker_class=WORKER, TOKENMILL_FUNCTION_THREADS="1", **waits)
    failure = str(workers.result(planning).exc_string)
    assert "FileTimeout: planning went on without a sign of life for more than 3 s" in failure
    assert workers.result(bulk.enqueue("tests.worker.functions.add", 1, 2)).return_value == 3


def test_two_shards_whose_prompts_exceed_the_memory_together_are_opened_though_their_store_is_slow(
    redis: Redis, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_no_room = threading.Event()

    class Memory(ShardBytes):
        def check_room(self) -> None:
            self._tell(super().check_room)

        def hold(self, num_bytes: int, already_held: int = 0) -> None:
            self._tell(super().hold, num_bytes, already_held)

        def _tell(self, call: Callable[..., None], *arguments: int) -> None:
            try:
                call(*arguments)
            except NoRoomYet:
                found_no_room.set()
                raise

    context = JobContext(redis, "bulk", "job", "execution", (str(tmp_path.resolve()),), MODEL)
    rows = 10 << 10
    for name in ("a", "b"):
        prompts = pa.table({"prompt": [name * 1024 + str(row) for row in range(rows)]})
        pq.write_table(prompts, tmp_path / name)
        score_parquet(
            context, str(tmp_path / name), str(tmp_path / f"{name}-out"), rows_per_shard=rows
        )
    monkeypatch.setattr(LocalFiles, "stat", slow(LocalFiles.stat, 0.05))
    context = replace(context, shard_bytes=Memory(16 << 20))
    tasks = [task_of(job.func_name, job.args, job.kwargs) for job in queued_jobs(redis)]
    jobs = [files.open(task, context) for task in tasks if task is not None]
    for number in (1, 2):
        files.try_until(number)
        assert found_no_room.wait(30)
        job = jobs[files.reports[-1][0]]
        assert isinstance(job.open_task, ShardWork)
        list(job.open_task.requests())  # its prompts are the engine's from here on
        files.files.close(job.claimed.job_id, job.open_task)
