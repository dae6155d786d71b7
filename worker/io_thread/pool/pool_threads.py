"""All threads of a worker that run what may block, and what becomes of those that hang."""

from __future__ import annotations

import logging

from worker.io_thread.held.inspections import Inspections
from worker.io_thread.pool.task_files import TaskFiles
from worker.store.user_code import Webhooks
from worker.threads.functions import FunctionPool

_FUNCTIONS_LEAVE_S = 1.0
"""How long a worker that leaves waits for functions and callbacks to end that it has interrupted."""


class PoolThreads:
    """The pools of files, functions, callbacks, webhooks and inspections. Used by the I/O thread only.

    grace_s: seconds from its interrupt to when a thread is given up.
    """

    def __init__(
        self,
        files: TaskFiles,
        functions: FunctionPool,
        enders: FunctionPool,
        webhooks: Webhooks,
        inspections: Inspections,
        grace_s: float,
        log: logging.Logger,
    ) -> None:
        self._files, self._functions, self._enders = files, functions, enders
        self._webhooks, self._inspections = webhooks, inspections
        self._grace_s, self._log = grace_s, log

    @property
    def _pools(self) -> tuple[FunctionPool | TaskFiles, ...]:
        return self._functions, self._enders, self._webhooks.pool, self._files

    @property
    def num_stuck(self) -> int:
        """Threads that were given up and go on in code that nothing can interrupt."""
        return sum(pool.num_stuck for pool in self._pools)

    def give_up_stuck(self) -> None:
        """Give up the threads that do not heed their interrupts."""
        for place in [place for pool in self._pools for place in pool.give_up_stuck(self._grace_s)]:
            self._log.error(
                "%s goes on %g s after its interrupt: given up, another thread takes its place (%d stuck)",
                place,
                self._grace_s,
                self.num_stuck,
            )

    def close(self, timeout_s: float) -> None:
        """End the threads; wait until the files of the jobs that ended are closed, at most `timeout_s`."""
        for pool in (self._files, self._functions, self._enders):
            pool.end()
        self._inspections.end()
        self._files.join(timeout_s)
        self._functions.join(_FUNCTIONS_LEAVE_S)
        self._enders.join(_FUNCTIONS_LEAVE_S)
        self._webhooks.close()
