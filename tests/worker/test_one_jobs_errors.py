"""An error that nobody foresaw, about one of ten held jobs, costs that job alone, wherever it is raised."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq import Callback, Queue
from rq.job import JobStatus
from rq.serializers import JSONSerializer

import worker
from jobs.tasks import OpenTask
from tests.worker.functions import add
from tests.worker.stores import claim, worker_store
from tests.worker.whole_worker import MAX_FILES, MAX_FUNCTIONS, WholeWorker
from worker.io_thread import io_loop
from worker.io_thread.faults import WorkerFault
from worker.io_thread.held.held_jobs import HeldJob
from worker.io_thread.held.job_guard import JobGuard
from worker.store.job_store import ReleasedJob
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.outcome import Outcome

NINE = 9
PAUSE_S = 0.002
FOREVER_S = 60.0  # for the children of checks and files, which a busy machine starts slowly
LAST_RESORT = {"JobRunner.holds", "JobRunner.abandon", "HeldJobs.remove"}
"""What the guard itself calls when a job could not even be failed; they touch a dictionary."""


class Unforeseen(Exception):
    """Known to nobody."""


@dataclass(frozen=True, order=True)
class Place:
    """A call about one job: what is called, and by which function."""

    called: str
    caller: str


@dataclass
class Fault:
    """Notes the calls that are about the victim, and raises at one place. always: from its first passage on."""

    is_victim: Callable[[str], bool] = lambda job_id: False
    place: Place | None = None
    always: bool = False
    places: set[Place] = field(default_factory=set)
    has_struck: bool = False
    runner: Any = None

    def passes(self, name: str, args: tuple[Any, ...]) -> None:
        is_batch = name.startswith("JobStore.")
        if not any(self._is_about(arg, is_batch) for arg in args):
            return
        place = Place(name, sys._getframe(2).f_code.co_name)
        self.places.add(place)
        if place == self.place and (self.always or not self.has_struck):
            self.has_struck = True
            raise Unforeseen

    def _is_about(self, value: Any, is_batch: bool) -> bool:
        if isinstance(value, HeldJob):
            return self.is_victim(value.claimed.job_id)
        if isinstance(value, Outcome | WorkerFault):
            return self.is_victim(value.claimed.job_id)
        if isinstance(value, ClaimedJob | ReleasedJob):
            return self.is_victim(value.job_id)
        if isinstance(value, OpenTask):
            jobs = list(self.runner.jobs) if self.runner is not None else []
            return any(
                job.open_task is value and self.is_victim(job.claimed.job_id) for job in jobs
            )
        if is_batch and isinstance(value, list | tuple):
            return any(self._is_about(each, is_batch) for each in value)
        return False


FAULT = Fault()


def wrapped(function: Any, name: str) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        FAULT.passes(name, args)
        return function(*args, **kwargs)

    return call


def modules() -> list[Any]:
    """All that the I/O thread runs, and the store."""
    found = [each.name for each in pkgutil.walk_packages(worker.__path__, "worker.")]
    return [
        importlib.import_module(name)
        for name in found
        if name.startswith(("worker.io_thread.", "worker.store."))
    ]


def tasks(kind: type[OpenTask] = OpenTask) -> Iterator[type[OpenTask]]:
    yield kind
    for each in kind.__subclasses__():
        yield from tasks(each)


@pytest.fixture(autouse=True, scope="module")
def every_call_can_be_struck() -> Iterator[None]:
    """Wrap all functions of the I/O thread, of the store and of tasks: one that is added later is wrapped, too."""
    patch = pytest.MonkeyPatch()
    patch.setattr(io_loop, "POLL_S", PAUSE_S)
    functions: dict[Any, Any] = {}
    classes: set[Any] = set(tasks())
    for module in modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__.startswith("worker."):
                functions.setdefault(value, wrapped(value, value.__qualname__))
                patch.setattr(module, name, functions[value])
            elif (
                inspect.isclass(value)
                and value.__module__ == module.__name__
                and value is not JobGuard
            ):
                classes.add(value)
    for kind in classes:
        for name, value in list(vars(kind).items()):
            if (
                name.startswith("__")
                or f"{kind.__name__}.{name}" in LAST_RESORT
                or name == "fail_unforeseen"
            ):
                continue
            if isinstance(value, FunctionType):
                patch.setattr(kind, name, wrapped(value, f"{kind.__name__}.{name}"))
            elif (
                isinstance(value, property)
                and value.fget is not None
                and "open_task" in value.fget.__code__.co_names
            ):
                patch.setattr(kind, name, property(wrapped(value.fget, f"{kind.__name__}.{name}")))
    yield
    patch.undo()


@pytest.fixture
def queue(redis: Redis) -> Queue:
    return Queue("bulk", connection=redis, serializer=JSONSerializer, default_timeout=-1)


# What the victim is, and what happens to it


def a_prompt(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    return queue.enqueue("jobs.complete", ["a", "b"], max_tokens=3, check={"regex": ".*"}).id


def a_prompt_with_dependents(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    job = queue.enqueue(
        "jobs.complete", "a", max_tokens=1, on_failure=Callback("tests.worker.functions.ignore")
    )
    queue.enqueue("jobs.complete", "b", max_tokens=1, depends_on=job)
    return str(job.id)


def a_shard(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), folder / "in.parquet")
    output = folder / f"out-{time.monotonic_ns()}"
    queue.enqueue(
        "jobs.score_parquet", str(folder / "in.parquet"), str(output), sampling={"max_tokens": 30}
    )
    return "-00000"


def a_function(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    hook = Callback("tests.worker.functions.on_success_state")
    return str(queue.enqueue("tests.worker.functions.own_state", on_success=hook).id)


def a_stopped_prompt(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    job = queue.enqueue("jobs.complete", "hang")
    whole.after_turns(4, lambda: whole.io.stop_job(job.id))
    return str(job.id)


def an_overdue_prompt(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    return str(queue.enqueue("jobs.complete", "hang", job_timeout=50).id)


def an_abandoned_prompt(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    """With which as many workers have died as may."""
    job = queue.enqueue("jobs.complete", "a")
    (held,) = claim(worker_store(queue.connection, "dead"))
    queue.connection.delete(
        f"rq:execution:{job.id}:{held.execution_id}", "tokenmill:maintenance:bulk"
    )
    queue.connection.set(f"tokenmill:deaths:{job.id}", 1)
    return str(job.id)


def one_that_rqs_worker_left(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    job = queue.enqueue("jobs.complete", "a")
    queue.remove(job)
    queue.connection.zadd("rq:wip:bulk", {f"{job.id}:execution": 1})
    queue.connection.hset(job.key, "status", "started")
    return str(job.id)


def a_deleted_prompt(queue: Queue, folder: Path, whole: WholeWorker) -> str:
    job = queue.enqueue("jobs.complete", "hang")
    whole.after_turns(4, lambda: queue.connection.delete(job.key))
    return str(job.id)


VICTIMS = [
    a_prompt, a_prompt_with_dependents, a_shard, a_function, a_stopped_prompt, an_overdue_prompt, an_abandoned_prompt,
    one_that_rqs_worker_left, a_deleted_prompt,
]  # fmt: skip


def run(
    make: Callable[..., str],
    queue: Queue,
    folder: Path,
    whole: WholeWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Have the worker hold ten jobs, and see that nine are answered and the tenth is failed by name, or let go."""
    redis = queue.connection
    redis.flushall()
    FAULT.has_struck, FAULT.runner = False, whole.runner
    caplog.clear()
    victim = make(queue, folder, whole)
    FAULT.is_victim = lambda job_id: job_id.endswith(victim)
    nine = [queue.enqueue("jobs.complete", [f"{n}", "x"], max_tokens=2) for n in range(NINE - 1)]
    nine.append(queue.enqueue(add, 1, 2))
    deadline = time.monotonic() + FOREVER_S
    while (whole.runner.num_held or queue.job_ids) and time.monotonic() < deadline:
        assert whole.turn()
        time.sleep(PAUSE_S)
    assert whole.io.failure is None
    assert not whole.runner.num_held, f"{FAULT.place}: a job is held for ever"
    for job in nine:
        assert job.get_status() == JobStatus.FINISHED, FAULT.place
    if FAULT.has_struck and FAULT.place is not None and not FAULT.place.called.endswith(".close"):
        assert "Unforeseen" in caplog.text, FAULT.place


def settle(whole: WholeWorker) -> None:
    """Wait for the calls in threads that nobody awaits any more."""
    deadline = time.monotonic() + FOREVER_S
    while time.monotonic() < deadline:
        whole.turn()
        if (whole.packer.free_functions, whole.packer.free_files) == (MAX_FUNCTIONS, MAX_FILES):
            return
        time.sleep(PAUSE_S)


def places_of(
    make: Callable[..., str], queue: Queue, folder: Path, caplog: pytest.LogCaptureFixture
) -> list[Place]:
    whole = WholeWorker(queue.connection, str(folder))
    FAULT.places, FAULT.place = set(), None
    run(make, queue, folder, whole, caplog)
    whole.close()
    return sorted(FAULT.places)


def strike(
    make: Callable[..., str],
    places: list[Place],
    queue: Queue,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    always: bool = False,
) -> None:
    """Have each of these calls raise in its turn, about a new victim each time."""
    whole = WholeWorker(queue.connection, str(folder))
    for place in places:
        FAULT.place, FAULT.always = place, always
        run(make, queue, folder, whole, caplog)
        FAULT.place = None
        if not always:
            settle(whole)
            assert (whole.packer.in_engine, whole.packer.free_functions) == ((0,), MAX_FUNCTIONS), (
                place
            )
            assert whole.packer.free_files == MAX_FILES, place
    whole.close()


# Of threads that are interrupted.
quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@quiet
def test_nine_of_ten_are_answered_wherever_an_error_is_raised(
    queue: Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call about a job raises once, about the first kind of victim that passes it."""
    struck: set[Place] = set()
    for make in VICTIMS:
        places = places_of(make, queue, tmp_path, caplog)
        assert len(places) > 10
        strike(make, [each for each in places if each not in struck], queue, tmp_path, caplog)
        struck.update(places)


@quiet
@pytest.mark.long
@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("make", VICTIMS, ids=lambda make: make.__name__)
def test_nine_of_ten_are_answered_whatever_is_raised_about_the_tenth(
    queue: Queue,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[..., str],
    always: bool,
) -> None:
    """Each call raises about each kind of victim, so that what differs between them is found, too."""
    places = places_of(make, queue, tmp_path, caplog)
    strike(make, places, queue, tmp_path, caplog, always=always)
