"""The task of `jobs.score_shard`: the rows of one shard in, one part out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.shown import shown
from ..context import JobContext
from ..errors import InvalidJob, InvalidValue
from ..runs.names import is_run_id
from ..tasks import Task

if TYPE_CHECKING:
    from .retry_work import RetryWork
    from .shard_work import ShardWork


class ShardTask(Task):
    """Names one shard. What touches files is in ShardWork, which needs pyarrow and is imported in open()."""

    blocking = reads_rows = True

    def __init__(self, run: str, plan: str, shard: int, redo_damaged: bool, retry_errors: bool) -> None:
        self._run, self._plan, self._shard = run, plan, shard
        self._redo, self._retry = redo_damaged, retry_errors

    def open(self, context: JobContext) -> ShardWork | RetryWork:
        """Read the shard's rows, or find its part there already. Raises RunError."""
        if self._retry:
            from .retry_work import RetryWork

            return RetryWork.open(context, self._run, self._plan, self._shard)
        from .shard_work import ShardWork

        return ShardWork.open(context, self._run, self._plan, self._shard, self._redo)


def shard_task(
    run: str, plan: str, shard: int, redo_damaged: bool = False, retry_errors: bool = False
) -> ShardTask:
    """Return the task of jobs.score_shard. Raises InvalidJob when an argument is wrong."""
    if not is_run_id(run):
        raise InvalidValue(
            "run is {}, expected the id of a planned run: enqueue jobs.score_parquet instead", shown(run)
        )
    if not isinstance(plan, str):
        raise InvalidJob(f"plan is {type(plan).__name__}, expected the path of a run's _plan.json")
    if not isinstance(shard, int) or isinstance(shard, bool) or shard < 0:
        raise InvalidValue("shard is {}, expected the number of a shard", shown(shard))
    for name, value in (("redo_damaged", redo_damaged), ("retry_errors", retry_errors)):
        if not isinstance(value, bool):
            raise InvalidValue(f"{name} is {{}}, expected true or false", shown(value))
    if redo_damaged and retry_errors:
        raise InvalidJob("redo_damaged and retry_errors: a damaged part has no rows to try again")
    return ShardTask(run, plan, shard, redo_damaged, retry_errors)
