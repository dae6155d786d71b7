"""What a worker does for all of them every now and then, beside its jobs."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from worker.io_thread.limits import Timer
from worker.store.registries import Registries
from worker.threads.functions import FunctionPool

_SCHEDULER_PERIOD_S = 5.0
_LEFT_PERIOD_S = 10.0


class Maintenance:
    """Cleans RQ's registries, queues jobs that were left, and keeps the scheduler's process up.

    registries: for the threads of `pool`, which do the first two. keep_scheduler: starts the process again
    where it has ended.
    """

    def __init__(
        self,
        registries: Registries,
        queue_names: Sequence[str],
        pool: FunctionPool,
        keep_scheduler: Callable[[], None],
        period_s: float,
        log: logging.Logger,
    ) -> None:
        self._registries, self._queue_names = registries, queue_names
        self._pool, self._log = pool, log
        self._keep_scheduler = keep_scheduler
        self._clean, self._look = Timer(period_s), Timer(_SCHEDULER_PERIOD_S)
        self._queue_left = Timer(_LEFT_PERIOD_S)

    def do_what_is_due(self, moment: float) -> None:
        """Start what is due at `moment` (monotonic seconds)."""
        if self._look.due(moment):
            self._keep_scheduler()
        if self._queue_left.due(moment):
            self._pool.submit(lambda: self._registries.queue_left(self._queue_names), self._report)
        if self._clean.due(moment):
            self._pool.submit(lambda: self._registries.clean(self._queue_names), self._report)

    def _report(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            self._log.error("could not clean up in Redis (%s); trying again in the next period", error)
