"""Faults of the worker's own surroundings, for which a job is not to blame."""

from dataclasses import dataclass

from redis.exceptions import ConnectionError as RedisConnectionError

from jobs.common.display import shown_error
from sandbox.exhausted import is_exhausted
from worker.store.records.claimed_job import ClaimedJob

MAX_IN_A_ROW = 3
"""The worker leaves after this many faults in a row with jobs of one function. A job that ends well ends the row."""

PAUSE_S = 1.0
"""Seconds for which a worker claims nothing after a fault, so that another worker takes the job."""


def is_fault(error: BaseException | None) -> bool:
    """Whether this error of our own code means that the worker lacks a module, memory, descriptors or local disk."""
    if isinstance(error, RedisConnectionError):
        # Perhaps this process could not open a socket. redis-py wraps that error.
        return is_fault(error.__cause__ or error.__context__)
    return isinstance(error, ImportError) or is_exhausted(error)


@dataclass(frozen=True)
class WorkerFault:
    """A fault that this worker met with a job.

    counts_against_job: whether the fault counts as if the worker had died with the job, see WorkerFaults.
    """

    claimed: ClaimedJob
    error: BaseException
    counts_against_job: bool

    def __str__(self) -> str:
        return shown_error(self.error)


class WorkerFaults:
    """Counts this worker's faults by function. A job that ends well clears the faults of its function.

    A job's first fault here counts against the job. If the job meets another fault before a job of its function has
    ended well, this worker may be to blame. So the second fault does not count against the job.
    """

    def __init__(self) -> None:
        # By function: the ids of the jobs that met a fault. They are dropped when a job of the function ends well. The
        # key None is for jobs that met a fault before their function's name was read.
        self._job_ids: dict[str | None, list[str]] = {}
        self.waiting: list[WorkerFault] = []
        """The faults whose jobs are still to be given back."""

    @property
    def num_in_a_row(self) -> int:
        """The most faults in a row that the jobs of one function have met. A job that ends well ends the row."""
        return max(map(len, self._job_ids.values()), default=0)

    def note(
        self, claimed: ClaimedJob, function_name: str | None, error: BaseException
    ) -> WorkerFault:
        """Note a fault that this worker met with a job, add it to `waiting`, and return it."""
        job_ids = self._job_ids.setdefault(function_name, [])
        is_first_of_job = claimed.job_id not in job_ids
        fault = WorkerFault(claimed, error, counts_against_job=is_first_of_job)
        job_ids.append(claimed.job_id)
        self.waiting.append(fault)
        return fault

    def note_success(self, function_name: str | None) -> None:
        """Note that a job of this function ended well."""
        self._job_ids.pop(function_name, None)
