"""Answers that are looked at before their tasks get them: in threads, as that may take its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine import Completion
from jobs.context.checks.processes import Checks
from jobs.tasks import OpenTask
from worker.threads.functions import FunctionPool

THREADS = 2
"""So many answers are looked at at once; each thread waits for a process of its own."""


class Inspections:
    """Calls `OpenTask.inspect`. All methods belong to the I/O thread, to which `post` queues calls.

    checks: what tasks look with; each call of it ends within its limit of time.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], checks: Checks) -> None:
        self._post, self._checks = post, checks
        self._pool = FunctionPool(THREADS, "tokenmill-checks")

    def submit(
        self,
        task: OpenTask,
        index: int,
        completions: Sequence[Completion],
        then: Callable[[BaseException | None], None],
    ) -> None:
        """Have a task look at what a request got, then call `then` here with what that raised."""
        self._pool.submit(
            lambda: task.inspect(index, completions),
            lambda _, error: self._post(lambda: then(error)),
            raises=False,
        )

    def end(self) -> None:
        """Let threads and processes end with what they are at."""
        self._pool.end()
        self._checks.close()
