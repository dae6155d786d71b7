"""JobGuard: limits an unforeseen error to the one job that it is about."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from worker.io_thread.held.held_jobs import HeldJob
from worker.metrics.tally import Tally
from worker.store.client import is_server_fault
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.outcome import frames_of

Item = TypeVar("Item")
Reply = TypeVar("Reply")


class JobOwner(Protocol):
    """Ends jobs, and lets go of them."""

    def holds(self, job: HeldJob) -> bool:
        """Whether this worker still holds the job."""

    def fail_unforeseen(self, job: HeldJob, error: Exception) -> None:
        """End the job as failed, with this error."""

    def abandon(self, job: HeldJob) -> None:
        """Let go of the job without writing anything, so that its lease runs out. Raises nothing."""


class JobGuard:
    """Surrounds every call of the I/O thread that concerns a job.

    An error in such a call fails the job, and the thread goes on. If failing the job raises too, the job is let go. Its
    lease then runs out, which counts as a worker's death. Errors of the Redis server, and errors that end a process,
    pass through.
    """

    def __init__(self, log: logging.Logger, tally: Tally, owner: JobOwner) -> None:
        self._log = log
        self._tally = tally
        self._owner = owner

    def around(self, job: HeldJob | ClaimedJob) -> "_Guarded":
        """Return a context that handles errors about this job. Errors about a ClaimedJob are only logged."""
        return _Guarded(self, job)

    def call(self, job: HeldJob, function: Callable[..., None], *args: Any) -> None:
        """Call a function that concerns a job. If it raises, only the job fails."""
        with self.around(job):
            function(*args)

    def for_each(self, jobs: Iterable[HeldJob], act: Callable[[HeldJob], None]) -> None:
        """Call `act` for each job. If it raises for one job, it is still called for the next jobs."""
        for job in jobs:
            with self.around(job):
                act(job)

    def batch(
        self,
        items: Sequence[Item],
        job_of: Callable[[Item], HeldJob | ClaimedJob],
        call: Callable[[Sequence[Item]], Sequence[Reply]],
    ) -> list[Reply]:
        """Make one call for many items, each about a job, and return its replies.

        If the call raises, it is made again for each item alone, to find the job at fault. So the call must be safe
        to repeat.
        """
        if not items:
            return []
        try:
            return list(call(items))
        except Exception as error:  # the call is made for each item alone below
            if is_server_fault(error):
                raise
            self._log.error(
                "a call for %d jobs is made again one by one: %s, at %s",
                len(items),
                type(error).__name__,
                frames_of(error),
            )
        replies: list[Reply] = []
        for item in items:
            with self.around(job_of(item)):
                replies += call([item])
        return replies

    def blame(self, job: HeldJob | ClaimedJob, error: Exception) -> None:
        """Fail a job because of an error. If that is not possible, let go of the job."""
        claimed = job.claimed if isinstance(job, HeldJob) else job
        self._tally.count_unforeseen(claimed.queue_name, error)
        self._log.error(
            "%s: job %s met an error that nobody foresaw, %s; traceback, the last call first: %s",
            claimed.queue_name,
            claimed.job_id,
            type(error).__name__,
            frames_of(error),
        )

        if not isinstance(job, HeldJob):  # this worker does not hold the job, so it cannot end it
            return
        if not job.is_blamed and self._owner.holds(job):
            job.is_blamed = True
            try:
                self._owner.fail_unforeseen(job, error)
                return
            except Exception as second_error:  # noqa: BLE001  # the job is let go below
                self._tally.count_unforeseen(claimed.queue_name, second_error)
                self._log.error(
                    "%s: job %s could not even be failed, and is let go: %s; traceback, the last call first: %s",
                    claimed.queue_name,
                    claimed.job_id,
                    type(second_error).__name__,
                    frames_of(second_error),
                )
        self._owner.abandon(job)


class _Guarded:
    """The context that `around` returns. A `@contextmanager` would take a microsecond longer for each request."""

    __slots__ = ("_guard", "_job")

    def __init__(self, guard: JobGuard, job: HeldJob | ClaimedJob) -> None:
        self._guard = guard
        self._job = job

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or is_server_fault(error):
            return False
        self._guard.blame(self._job, error)
        return True
