"""Runs functions in the threads of a pool: users' functions, and our own without an engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jobs.runs.end_notices import POSTING
from jobs.table import own_function
from worker.io_thread.held.held_jobs import Beginnings, HeldJob
from worker.io_thread.parts import Parts
from worker.io_thread.pool_calls import PoolCall, PoolCalls, Then
from worker.store.records.bounds import FunctionCall
from worker.store.user_code import perform
from worker.threads.functions import FunctionPool

MAX_POSTS = 64
"""Ends of runs that may wait to be told; further ones are for other workers."""


class FunctionRunner:
    """Hands functions to threads once Redis shows that they begin. Used by the I/O thread only."""

    def __init__(self, parts: Parts, calls: PoolCalls, beginnings: Beginnings) -> None:
        self._packer, self._calls, self._beginnings = parts.packer, calls, beginnings
        self._pool, self._webhook_pool = parts.functions, parts.callbacks.webhooks.pool
        self._environment, self._clients = parts.environment, parts.clients

    def run(self, job: HeldJob, then: Then) -> None:
        """Run a user's function, then call `then` with its value, or the `Raised` that it raised."""
        self._run(job, lambda: partial(perform, job.for_user_code(self._clients.user)), then, self._pool)

    def run_own(self, job: HeldJob, call: FunctionCall, then: Then) -> None:
        """Run a function of our own, then call `then`."""
        own = own_function(call.name)
        assert own is not None, call.name
        context = self._environment.context(job.claimed, self._clients.pool)
        function = partial(own, context, *call.args, **call.kwargs)
        pool = self._webhook_pool if call.name == POSTING else self._pool
        self._run(job, lambda: function, then, pool, is_ours=True)

    def _run(
        self,
        job: HeldJob,
        function: Callable[[], Callable[[], Any]],
        then: Then,
        pool: FunctionPool,
        is_ours: bool = False,
    ) -> None:
        """Run a function once the job has begun. function: makes the call for the thread."""
        job.run_function()
        if _takes_a_place(job):
            self._packer.function_started(job)

        def hand_over() -> None:
            self._calls.submit(pool, job, PoolCall(function(), then, self._came_back, is_ours))

        self._beginnings.run(job, hand_over)

    def _came_back(self, job: HeldJob, _: Any) -> None:
        if _takes_a_place(job):
            self._packer.function_ended(job)

    def withdraw(self, job: HeldJob) -> None:
        """Free its thread, if the function was not handed over yet."""
        if self._beginnings.forget(job) and _takes_a_place(job):
            self._packer.function_ended(job)

    def has_place(self, job: HeldJob) -> bool:
        """Whether another function may run here."""
        if _takes_a_place(job):
            return self._packer.free_functions > 0
        return self._webhook_pool.num_waiting < MAX_POSTS


def _takes_a_place(job: HeldJob) -> bool:
    """Whether a function counts among the running ones: one that tells of a run's end does not."""
    return job.function_name != POSTING
