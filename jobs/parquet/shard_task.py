"""The task of `jobs.score_shard`: the rows of one shard in, one part out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..common.shown import shown
from ..context import JobContext
from ..errors import InvalidJob, InvalidValue
from ..runs.names import is_run_id
from ..tasks import Completion, Request, Task

if TYPE_CHECKING:
    from .shard_work import ShardWork


class ShardTask(Task):
    """Scores one shard. What touches files is in ShardWork, which needs pyarrow and is imported in open()."""

    blocking = True

    def __init__(self, run: str, plan: str, shard: int, redo_damaged: bool) -> None:
        self._run, self._plan, self._shard, self._redo = run, plan, shard, redo_damaged
        self._work: ShardWork | None = None

    def open(self, context: JobContext) -> None:
        """Read the shard's rows, or find its part there already. Raises RunError."""
        from .shard_work import ShardWork

        self._work = ShardWork.open(context, self._run, self._plan, self._shard, self._redo)

    def requests(self) -> Iterator[Request]:
        return self._opened().requests()

    @property
    def num_requests(self) -> int:
        return self._opened().num_requests

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        self._opened().deliver(index, completions)

    def progress(self) -> dict[str, Any] | None:
        return self._work.progress() if self._work else None

    def result(self) -> dict[str, Any]:
        """Publish the part and finish the run if it was the last one. Raises RunError."""
        return self._opened().finish()

    def close(self) -> None:
        # Let go of at once: the worker's callbacks refer to each other, and would keep it for the collector.
        work, self._work = self._work, None
        if work is not None:
            work.close()

    def _opened(self) -> ShardWork:
        assert self._work is not None, "used before open()"
        return self._work


def shard_task(run: str, plan: str, shard: int, redo_damaged: bool = False) -> ShardTask:
    """Return the task of jobs.score_shard. Raises InvalidJob when an argument is wrong."""
    if not is_run_id(run):
        raise InvalidValue(
            "run is {}, expected the id of a planned run: enqueue jobs.score_parquet instead", shown(run)
        )
    if not isinstance(plan, str):
        raise InvalidJob(f"plan is {type(plan).__name__}, expected the path of a run's _plan.json")
    if not isinstance(shard, int) or isinstance(shard, bool) or shard < 0:
        raise InvalidValue("shard is {}, expected the number of a shard", shown(shard))
    if not isinstance(redo_damaged, bool):
        raise InvalidValue("redo_damaged is {}, expected true or false", shown(redo_damaged))
    return ShardTask(run, plan, shard, redo_damaged)
