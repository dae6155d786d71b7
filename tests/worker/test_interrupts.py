"""An error raised into a thread from outside waits while that thread imports a module."""

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rq.timeouts import JobTimeoutException

from worker.store.records.stored_job import ThreadDeathPenalty
from worker.threads.functions import FunctionPool, JobStopped
from worker.threads.interrupts import Call, check_interrupted, shield_imports

SLOW = """
import import_gate
import_gate.runs.append(__name__)
import_gate.begun.set()
assert import_gate.go.wait(60)
VALUE = 1
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the module `slow_to_import` meets while it is executed."""
    shield_imports()
    gate = SimpleNamespace(runs=[], begun=threading.Event(), go=threading.Event())
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "import_gate", gate)  # type: ignore[arg-type]
    yield gate
    gate.go.set()
    for name in ("slow_to_import", "here_first", "there_first"):
        sys.modules.pop(name, None)


@pytest.fixture
def pool() -> Iterator[FunctionPool]:
    pool = FunctionPool(2, "test")
    yield pool
    pool.close(60)


def submit(pool: FunctionPool, function: Callable[[], Any]) -> tuple[Call, Future[Any]]:
    """Run user code in a pool; the future gets its outcome."""
    outcome: Future[Any] = Future()

    def done(value: Any, error: BaseException | None) -> None:
        if error is None:
            outcome.set_result(value)
        else:
            outcome.set_exception(error)

    return pool.submit(function, done), outcome


def value_by_statement() -> int:
    from slow_to_import import VALUE  # type: ignore[import-not-found]

    return int(VALUE)


def value_by_function() -> int:
    return int(importlib.import_module("slow_to_import").VALUE)


@pytest.mark.parametrize("read", [value_by_statement, value_by_function])
def test_an_interrupted_import_is_finished_first_and_not_made_again(
    gate: SimpleNamespace, pool: FunctionPool, read: Callable[[], int]
) -> None:
    call, outcome = submit(pool, read)
    assert gate.begun.wait(60)
    call.interrupt(JobStopped)
    gate.go.set()
    assert isinstance(outcome.exception(60), JobStopped)
    assert submit(pool, read)[1].result(60) == 1
    assert gate.runs == ["slow_to_import"]


def test_a_callbacks_limit_waits_for_its_import(gate: SimpleNamespace, pool: FunctionPool) -> None:
    def limited() -> None:
        limit = ThreadDeathPenalty(60, JobTimeoutException)
        with limit:
            gate.limits.append(limit)
            value_by_statement()

    gate.limits = []
    _, outcome = submit(pool, limited)
    assert gate.begun.wait(60)
    gate.limits[0].handle_death_penalty()
    gate.go.set()
    assert isinstance(outcome.exception(60), JobTimeoutException)
    gate.limits[0].handle_death_penalty()  # a timer that was late: it hits nobody
    assert submit(pool, value_by_statement)[1].result(60) == 1
    assert gate.runs == ["slow_to_import"]


def test_an_interrupt_never_hits_the_next_call_whenever_it_comes(pool: FunctionPool) -> None:
    """Calls that end while they are interrupted: each is told what happened to it, and no thread is lost."""
    for _ in range(500):
        begun = threading.Event()
        call, outcome = submit(pool, begun.set)
        begun.wait(60)
        call.interrupt(JobStopped)
        call.interrupt(JobTimeoutException)
        assert isinstance(outcome.exception(60), JobStopped | JobTimeoutException | None)
        assert submit(pool, lambda: "untouched")[1].result(60) == "untouched"


def test_our_own_code_is_not_interrupted_but_asks(pool: FunctionPool) -> None:
    begun, go = threading.Event(), threading.Event()
    outcome: Future[BaseException | None] = Future()
    steps = []

    def own() -> None:
        begun.set()
        assert go.wait(60)
        steps.append("not interrupted")
        check_interrupted()
        steps.append("went on")

    call = pool.submit(own, lambda value, error: outcome.set_result(error), is_interruptible=False)
    assert begun.wait(60)
    call.interrupt(JobStopped)
    go.set()
    assert isinstance(outcome.result(60), JobStopped)
    assert steps == ["not interrupted"]


PROFILED = """
import sys
from worker.threads.interrupts import Call

def interrupted():
    call.interrupt(KeyError)

call = Call({function}, lambda value, error: None)
call.run()
sys.setprofile(lambda *event: None)
def function(): ...
function()
"""


@pytest.mark.processes
@pytest.mark.parametrize("function", ["lambda: None", "interrupted"])
def test_a_process_can_be_profiled_after_a_call(function: str) -> None:
    """It hung at its first call of a function."""
    program = PROFILED.format(function=function)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
