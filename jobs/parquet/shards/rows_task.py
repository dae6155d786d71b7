"""A task that asks rows of a run: its requests, their deliveries, and what they hold."""

import os
from collections.abc import Iterator, Sequence

from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import PlanDamaged, RunOfAnotherModel, unlike
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.run_folder import load_plan
from jobs.parquet.shards.shard_requests import ShardRequests
from jobs.parquet.shards.shard_texts import ShardTexts
from jobs.runs.plans.names import PLAN, is_run_id
from jobs.runs.plans.plan import Plan
from jobs.tasks import Completion, OpenTask, Request


class RowsTask(OpenTask):
    """Asks what its subclass has put into `_requests`, or nothing, and lets go of `_texts`."""

    _requests: ShardRequests | None = None
    _texts: ShardTexts | None = None

    def requests(self) -> Iterator[Request]:
        return iter(()) if self._requests is None else self._requests.requests()

    @property
    def num_requests(self) -> int | None:
        return 0 if self._requests is None else self._requests.num_requests

    @property
    def has_more(self) -> bool:
        return self._requests is not None and self._requests.has_more

    @property
    def inspects(self) -> bool:
        return self._requests is not None and self._requests.inspects

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        self.asked.inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        self.asked.deliver(index, completions)

    @property
    def asked(self) -> ShardRequests:
        assert self._requests is not None, "nothing was asked"
        return self._requests

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._texts is not None:
            self._texts.close()


def check_model(plan: Plan, served: ServedModel, is_second: bool = False) -> None:
    """Raise RunOfAnotherModel. A BatchWorker leaves such a shard on its queue; a stock worker takes any."""
    model = plan.model_of(is_second)
    if model.pin != served.pin:
        raise RunOfAnotherModel(plan.run, str(model), f"{served}, which is served here")


def trusted_plan(context: JobContext, storage: Storage, plan_path: str, run: str) -> Plan:
    """Read the plan that a job names. Raises InvalidJob, PathOutsideRoots or PlanDamaged when it is not this run's."""
    if not is_run_id(run) or not isinstance(plan_path, str):
        raise unlike("run", run, "the id of a run, and the path of its plan: enqueue jobs.score_parquet instead")
    path = storage.resolve(plan_path)
    plan = context.files.plan((path, storage.stat(path)), lambda: load_plan(storage, path))
    if plan.run != run:
        raise PlanDamaged(path, f"it belongs to run {plan.run}, the job to {run}")
    if path != os.path.join(plan.spec.output, PLAN):
        raise PlanDamaged(path, f"it was written for {plan.spec.output}")
    return plan
