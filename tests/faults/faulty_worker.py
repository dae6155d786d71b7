"""A worker process that a fault hits at a named step. Production code knows nothing of this."""

import faulthandler
import functools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redis import Redis
from redis.connection import AbstractConnection
from rq.serializers import JSONSerializer

from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs import part, run_folder
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.planning import planner
from jobs.parquet.shards import shard_work
from jobs.runs.redis_state.state import RunState
from jobs.table import FileTask
from tests.faults import clock
from tests.worker.fake_engine import FakeEngine, FakeEngineWorker
from worker.io_thread.job_runner import JobRunner
from worker.store.job_store import JobStore
from worker.store.user_code import Callbacks

STEPS: dict[str, tuple[Any, str]] = {
    "claim": (JobStore, "claim"),
    "begin": (JobRunner, "add"),
    "renew": (JobStore, "renew"),
    "progress": (JobStore, "show_progress"),
    "finish": (JobStore, "finish"),
    "dependents queued": (JobStore, "queue_dependents"),
    "close": (JobStore, "close"),
    "release": (JobStore, "release"),
    "reclaim": (JobStore, "find_abandoned"),
    "callback": (Callbacks, "call_back"),
    "plan written": (planner, "create_plan"),
    "shards enqueued": (RunState, "write"),
    "run counted": (RunState, "amend_parts"),
    "shard open": (FileTask, "open"),
    "shard result": (shard_work.ShardWork, "result"),
    "file opened": (Storage, "open_output"),
    "part written": (part, "write_part"),
    "part published": (Storage, "publish"),
    "part counted": (RunState, "record_part"),
    "run committed": (RunFolder, "_finish"),
    "output written": (run_folder, "write_output"),
    "report made": (run_folder, "report_html"),
    "end marked": (Storage, "create"),
    "leftover deleted": (Storage, "remove"),
    "command sent": (AbstractConnection, "send_packed_command"),
    "engine step": (FakeEngine, "step"),
}
"""The steps of a worker at which a fault can strike, before or after the call."""

Action = Literal["kill", "freeze", "engine error", "clock jump"]

FUNCTIONS = ("add", "ask_for_retry", "ignore", "note_end")
"""Those of tests.worker.functions that jobs may name."""

SLOTS, PREFETCH = 8, 8
"""Few, so that the work is spread over all workers and each kill meets some."""


@dataclass(frozen=True)
class Strike:
    """What happens at the n-th passage of a step."""

    step: str
    after: bool
    nth: int
    action: Action


@dataclass(frozen=True)
class WorkerPlan:
    """One worker process: where it works, and what hits it."""

    name: str
    url: str
    folder: Path
    strike: Strike | None = None
    lease_s: int = 2
    answers: Path | None = None
    """A file that grows by one byte for each sequence that the engine completes."""
    jump_s: float = 0.0
    """How far the wall clock jumps where the strike is a clock jump."""

    @property
    def mark(self) -> Path:
        """This file appears when the strike happens."""
        return self.folder / "marks" / self.name

    @property
    def has_work(self) -> Path:
        """This file appears when the worker begins its first job."""
        return self.folder / "marks" / f"{self.name}.has-work"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / self.name


def serve(plan: WorkerPlan) -> None:
    """Work until ended from outside or by the strike; the target of a process of its own."""
    log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    os.chdir(plan.folder)
    os.environ.update(
        TOKENMILL_MODEL="fake",
        TOKENMILL_LEASE_S=str(plan.lease_s),
        TOKENMILL_MAX_NUM_SEQS=str(SLOTS),
        TOKENMILL_PREFETCH=str(PREFETCH),
        TOKENMILL_MAX_WORKER_DEATHS="1000000",
        TOKENMILL_DATA_ROOTS=str(plan.folder),
        TOKENMILL_ALLOWED_FUNCTIONS=",".join(
            f"tests.worker.functions.{name}" for name in FUNCTIONS
        ),
        FAKE_STEP_S="0.02",
    )
    _before(JobRunner, "add", plan.has_work.touch)
    if plan.strike is not None:
        if plan.strike.action == "clock jump":
            clock.install()
        _arm(plan.strike, plan.mark, plan.jump_s)
    if plan.answers is not None:
        _count_answers(plan.answers)
    worker = FakeEngineWorker(
        ["high", "bulk"],
        name=plan.name,
        connection=Redis.from_url(plan.url),
        serializer=JSONSerializer,
    )
    worker.work(logging_level="INFO")


def _before(owner: Any, name: str, call: Callable[[], None]) -> None:
    """Call something before the first passage of a step; then the step is as it was."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        call()
        return original(*args, **kwargs)

    setattr(owner, name, told)


def _arm(strike: Strike, mark: Path, jump_s: float) -> None:
    owner, name = STEPS[strike.step]
    original = getattr(owner, name)
    left, lock = [strike.nth], threading.Lock()

    def count_down() -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        mark.touch()
        if strike.action == "clock jump":
            clock.jump(jump_s)
        else:
            _ACTIONS[strike.action]()

    @functools.wraps(original)
    def struck(*args: Any, **kwargs: Any) -> Any:
        if not strike.after:
            count_down()
        value = original(*args, **kwargs)
        if strike.after:
            count_down()
        return value

    setattr(owner, name, struck)


def _count_answers(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    answer = FakeEngine._answer

    def counted(self: FakeEngine, *args: Any) -> Any:
        os.write(descriptor, b".")  # at once: a kill loses nothing of it
        return answer(self, *args)

    FakeEngine._answer = counted  # type: ignore[method-assign]


def _engine_error() -> None:
    raise RuntimeError("the engine was told to fail")


_ACTIONS: dict[Action, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "engine error": _engine_error,
}
