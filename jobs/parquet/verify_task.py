"""The task of `jobs.verify_rows`: rows of a finished run are computed again and compared with its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.shown import shown
from ..context import JobContext
from ..errors import InvalidJob, InvalidValue
from ..runs.names import is_run_id
from ..runs.row_sample import RowSample
from ..tasks import Task

if TYPE_CHECKING:
    from .verify_work import VerifyWork


class VerifyTask(Task):
    """Names the rows. What touches files is in VerifyWork, which needs pyarrow and is imported in open()."""

    blocking = reads_rows = True

    def __init__(self, run: str, plan: str, sample: RowSample, seed: int) -> None:
        self._run, self._plan, self._sample, self._seed = run, plan, sample, seed

    def open(self, context: JobContext) -> VerifyWork:
        """Read the rows and what the run has of them. Raises RunError or NoRoomYet."""
        from .verify_work import VerifyWork

        return VerifyWork(context, self._run, self._plan, self._sample, self._seed)


def verify_task(run: str, plan: str, sample: int | str = "1%", seed: int = 0) -> VerifyTask:
    """Return the task of jobs.verify_rows. Raises InvalidJob when an argument is wrong.

    run: the id of a finished run. plan: the path of its _plan.json. sample: as of RowSample.parse. seed:
    another one takes other rows.
    """
    if not is_run_id(run):
        raise InvalidValue("run is {}, expected the id of a finished run", shown(run))
    if not isinstance(plan, str):
        raise InvalidJob(f"plan is {type(plan).__name__}, expected the path of a run's _plan.json")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InvalidValue("seed is {}, expected a whole number", shown(seed))
    return VerifyTask(run, plan, RowSample.parse(sample), seed)
