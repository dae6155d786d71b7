"""All threads of a worker that run what may block, and what becomes of those that hang."""

from __future__ import annotations

import logging

from worker.io_thread.inspections import Inspections
from worker.io_thread.task_files import TaskFiles
from worker.threads.functions import FunctionPool

_FUNCTIONS_LEAVE_S = 1.0
"""How long a worker that leaves waits for functions and callbacks to end that it has interrupted."""


class PoolThreads:
    """The pools of files, functions, callbacks and inspections. All methods belong to the I/O thread.

    grace_s: seconds from its interrupt to when a thread is given up.
    """

    def __init__(
        self,
        files: TaskFiles,
        functions: FunctionPool,
        enders: FunctionPool,
        inspections: Inspections,
        grace_s: float,
        log: logging.Logger,
    ) -> None:
        self._files, self._functions, self._enders = files, functions, enders
        self._inspections = inspections
        self._grace_s, self._log = grace_s, log

    @property
    def num_stuck(self) -> int:
        """Threads that were given up and go on in code that nothing can interrupt."""
        return self._functions.num_stuck + self._enders.num_stuck + self._files.num_stuck

    def give_up_stuck(self) -> None:
        """Give up the threads that do not heed their interrupts."""
        pools = (self._functions, self._enders, self._files)
        for place in [place for pool in pools for place in pool.give_up_stuck(self._grace_s)]:
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
