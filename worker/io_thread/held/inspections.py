"""Answers that are looked at before their tasks get them: in threads, as that may take its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine import Completion
from jobs.context.checks.processes import Checks
from jobs.tasks import OpenTask
from worker.threads.functions import FunctionPool

THREADS = 2
"""So many answers are looked at at once; each thread waits for a process of its own."""


@dataclass(frozen=True)
class _Inspection:
    """What `Inspections.submit` was given."""

    index: int
    completions: Sequence[Completion]
    is_wanted: Callable[[], bool]
    then: Callable[[BaseException | None], None]


class Inspections:
    """Calls `OpenTask.inspect`. All methods belong to the I/O thread, to which `post` queues calls.

    Tasks take turns: one whose checks take long holds up another's for one check, not for all that it has.
    checks: what tasks look with; each call of it ends within its limit of time. num_running: answers that are
    looked at just now.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], checks: Checks) -> None:
        self._post, self._checks = post, checks
        self._pool = FunctionPool(THREADS, "tokenmill-checks")
        self._waiting: dict[OpenTask, deque[_Inspection]] = {}  # the next task first
        self.num_running = 0

    def submit(
        self,
        task: OpenTask,
        index: int,
        completions: Sequence[Completion],
        is_wanted: Callable[[], bool],
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Have a task look at what a request got, then call `then` here with what that raised.

        is_wanted: asked when it is its turn; where it is not wanted any more, neither is called.
        """
        inspection = _Inspection(index, completions, is_wanted, then)
        self._waiting.setdefault(task, deque()).append(inspection)
        self._start()

    def _start(self) -> None:
        while self._waiting and self.num_running < THREADS:
            task = next(iter(self._waiting))
            left = self._waiting.pop(task)
            inspection = left.popleft()
            if left:
                self._waiting[task] = left
            if inspection.is_wanted():
                self._run(task, inspection)

    def _run(self, task: OpenTask, inspection: _Inspection) -> None:
        self.num_running += 1
        self._pool.submit(
            lambda: task.inspect(inspection.index, inspection.completions),
            lambda _, error: self._post(lambda: self._ran(inspection, error)),
            raises=False,
        )

    def _ran(self, inspection: _Inspection, error: BaseException | None) -> None:
        self.num_running -= 1
        self._start()
        inspection.then(error)

    def end(self) -> None:
        """Let threads and processes end with what they are at."""
        self._pool.end()
        self._checks.close()
