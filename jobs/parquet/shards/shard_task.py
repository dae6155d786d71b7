"""The tasks of `jobs.score_shard` and `jobs.verify_rows`; what needs pyarrow is imported when they open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.errors import InvalidJob, InvalidValue
from jobs.runs.plans.names import is_run_id
from jobs.tasks import Task

if TYPE_CHECKING:
    from jobs.parquet.shards.shard_work import ShardWork
    from jobs.parquet.shards.verify_work import VerifyWork


class ShardTask(Task):
    """Names one shard."""

    blocking = reads_rows = True

    def __init__(self, run: str, plan: str, shard: int) -> None:
        """Check the arguments. Raises InvalidJob."""
        _check_run(run, plan)
        if not isinstance(shard, int) or isinstance(shard, bool) or shard < 0:
            raise InvalidValue("shard is {}, expected the number of a shard", brief(shard))
        self._run, self._plan, self._shard = run, plan, shard

    def open(self, context: JobContext) -> ShardWork:
        """Read the shard's rows, or find its part there already. Raises RunError."""
        from jobs.parquet.shards.shard_work import ShardWork

        return ShardWork.open(context, self._run, self._plan, self._shard)


class VerifyTask(Task):
    """Names some rows of a finished run. sample: "1%" (at least one row), 20 or "20"; seed: which of them."""

    blocking = reads_rows = True

    def __init__(self, run: str, plan: str, sample: int | str = "1%", seed: int = 0) -> None:
        """Check the arguments. Raises InvalidJob."""
        _check_run(run, plan)
        self._run, self._plan, self._sample, self._seed = run, plan, str(sample), seed

    def open(self, context: JobContext) -> VerifyWork:
        """Read the rows and what the run has of them. Raises RunError, InvalidValue or NoRoomYet."""
        from jobs.parquet.shards.verify_work import VerifyWork

        return VerifyWork(context, self._run, self._plan, self._sample, self._seed)


def _check_run(run: object, plan: object) -> None:
    if not is_run_id(run):
        raise InvalidValue(
            "run is {}, expected the id of a planned run: enqueue jobs.score_parquet instead", brief(run)
        )
    if not isinstance(plan, str):
        raise InvalidJob(f"plan is {type(plan).__name__}, expected the path of a run's _plan.json")
