"""Faults of the worker's own surroundings, for which a job is not to blame."""

from dataclasses import dataclass

from redis.exceptions import ConnectionError as RedisConnectionError

from jobs.common.display import shown_error
from sandbox.exhausted import is_exhausted
from worker.store.records.claimed_job import ClaimedJob

MAX_IN_A_ROW = 3
"""So many faults with jobs of one function, none of which ended well in between, and the worker leaves."""

PAUSE_S = 1.0
"""How long a worker claims nothing after a fault, so that another one takes the job it has given back."""


def is_fault(error: BaseException | None) -> bool:
    """Return whether our own code raised this for lack of a module, memory, descriptors or local disk."""
    if isinstance(error, RedisConnectionError):
        return is_fault(error.__cause__ or error.__context__)  # a socket that could not be opened
    return isinstance(error, ImportError) or is_exhausted(error)


@dataclass(frozen=True)
class WorkerFault:
    """A job's fault. counts: whether it is held against the job too."""

    claimed: ClaimedJob
    error: BaseException
    counts: bool

    def __str__(self) -> str:
        return shown_error(self.error)


class WorkerFaults:
    """The faults that a worker has met, by function, since a job of that function ended well.

    Each job counts once: several in a row speak against the worker, a repeated one against the job.
    """

    def __init__(self) -> None:
        self._rows: dict[str | None, list[str]] = {}
        self.waiting: list[WorkerFault] = []
        """Those whose jobs are to be given back."""

    @property
    def in_a_row(self) -> int:
        """The highest number of faults with jobs of one function."""
        return max(map(len, self._rows.values()), default=0)

    def met(self, claimed: ClaimedJob, function_name: str | None, error: BaseException) -> WorkerFault:
        """Note a fault."""
        row = self._rows.setdefault(function_name, [])
        fault = WorkerFault(claimed, error, counts=claimed.job_id not in row)
        row.append(claimed.job_id)
        self.waiting.append(fault)
        return fault

    def passed(self, function_name: str | None) -> None:
        """Note that a job of this function ended well."""
        self._rows.pop(function_name, None)
