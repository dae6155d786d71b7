"""An error raised into a thread from outside waits while that thread imports a module."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rq.timeouts import JobTimeoutException

from tests.rq_workers import wait_until
from worker.store.records.timeouts import ThreadDeathPenalty
from worker.threads.functions import Call, FunctionPool, JobStopped
from worker.threads.interrupts import check_interrupted, shield_imports

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


def wait_until_importing(thread_id: Callable[[], int | None]) -> None:
    """Return once a thread is inside importlib, or waits to be let in."""

    def is_importing() -> bool:
        frame = sys._current_frames().get(thread_id() or 0)
        while frame is not None:
            if "importlib" in frame.f_code.co_filename or frame.f_code.co_name == "_one_at_a_time":
                return True
            frame = frame.f_back
        return False

    wait_until(is_importing)


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


def test_a_thread_that_waits_for_an_interrupted_import_gets_the_whole_module(
    gate: SimpleNamespace, pool: FunctionPool
) -> None:
    """A shard failed for good like this: it waited for a module while a dropped planning imported it."""
    call, interrupted = submit(pool, value_by_statement)
    assert gate.begun.wait(60)
    second: list[int] = []

    def value_in_the_second_thread() -> int:
        second.append(threading.get_ident())
        return value_by_statement()

    _, waiting = submit(pool, value_in_the_second_thread)
    wait_until_importing(lambda: second[0] if second else None)
    call.interrupt(JobStopped)
    gate.go.set()
    assert isinstance(interrupted.exception(60), JobStopped)
    assert waiting.result(60) == 1
    assert gate.runs == ["slow_to_import"]


def test_two_modules_that_import_each_other_are_whole_for_threads_from_both_ends(
    gate: SimpleNamespace, pool: FunctionPool, tmp_path: Path
) -> None:
    """Python's own locks hand one of the threads a module half executed here."""
    gate.second, gate.may_end = [], threading.Event()
    (tmp_path / "here_first.py").write_text(
        "import import_gate\n"
        "import_gate.begun.set()\n"
        "assert import_gate.go.wait(60)\n"
        "HERE = 1\n"
        "import there_first\n"
        "def total(): return HERE + there_first.THERE\n"
    )
    (tmp_path / "there_first.py").write_text(
        "import threading, import_gate, here_first\n"
        "if threading.get_ident() in import_gate.second:\n"
        "    assert import_gate.may_end.wait(60)\n"
        "THERE = here_first.HERE + 1\n"
    )

    def from_here() -> int:
        return int(importlib.import_module("here_first").total())

    def from_there() -> int:
        gate.second.append(threading.get_ident())
        return int(importlib.import_module("there_first").THERE)

    _, here = submit(pool, from_here)
    assert gate.begun.wait(60)
    _, there = submit(pool, from_there)
    wait_until_importing(lambda: gate.second[0] if gate.second else None)
    gate.go.set()
    assert here.exception(60) is None
    gate.may_end.set()
    assert (here.result(60), there.result(60)) == (3, 2)


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
    for _ in range(2000):
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

    call = pool.submit(own, lambda value, error: outcome.set_result(error), raises=False)
    assert begun.wait(60)
    call.interrupt(JobStopped)
    go.set()
    assert isinstance(outcome.result(60), JobStopped)
    assert steps == ["not interrupted"]
