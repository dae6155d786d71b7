"""The base class of tasks that ask rows of a run, and checks of the plan that a job names."""

import os

from jobs.context import JobContext
from jobs.context.adapters import shown_adapter
from jobs.context.answers import Answer
from jobs.context.served_model import is_served
from jobs.errors import AdapterAwaited, PlanDamaged, RunOfAnotherModel, wrong_value_error
from jobs.items.runner import ItemRunner, ItemsTask
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.run_folder import load_plan
from jobs.parquet.shards.shard_texts import ShardTexts
from jobs.runs.plans.names import PLAN, is_run_id
from jobs.runs.plans.plan import Plan


class RowsTask(ItemsTask):
    """Asks rows, and frees the memory of their texts when it is closed."""

    runner: ItemRunner[Answer] | None = None
    _texts: ShardTexts | None = None

    @property
    def required_runner(self) -> ItemRunner[Answer]:
        """Return the runner. A task without a runner must not call this."""
        assert self.runner is not None, "nothing was asked"
        return self.runner

    def close(self) -> None:
        """Free the memory of the rows that are not answered, so that other shards can use it."""
        super().close()
        if self._texts is not None:
            self._texts.close()


def check_model(plan: Plan, context: JobContext, is_second: bool = False) -> None:
    """Raise RunOfAnotherModel if the plan's model is not served here, or AdapterAwaited if only an adapter is missing.

    A BatchWorker does not claim a shard that it cannot serve, but one of RQ's stock workers claims any shard. Also, an
    adapter's files may change after the claim.
    """
    model = plan.model_of(is_second)
    # Here the plan's adapters count as served. Missing adapters are looked for below.
    if not is_served(model.pin, {context.model.pin, *model.adapters}):
        raise RunOfAnotherModel(plan.run, str(model), f"{context.model}, which is served here")
    present = set(context.adapters.pinned)
    missing = [shown_adapter(adapter) for adapter in model.adapters if adapter not in present]
    if missing:
        raise AdapterAwaited(
            f"run {plan.run} needs the files of adapters {', '.join(missing)}, and they are not here now: put them back"
        )


def trusted_plan(context: JobContext, storage: Storage, plan_path: str, run: str) -> Plan:
    """Read the plan that a job names. Raises InvalidJob, PathOutsideRoots, or PlanDamaged for another run's plan."""
    if not is_run_id(run):
        raise wrong_value_error("run", run, "the id of a run: enqueue jobs.score_parquet instead")
    if not isinstance(plan_path, str):
        raise wrong_value_error(
            "plan", plan_path, "the path of the run's plan: enqueue jobs.score_parquet instead"
        )
    path = storage.resolve(plan_path)
    # A plan that was read before is read again only if its file has changed.
    state_of_file = (path, storage.stat(path))
    plan = context.files.plan(state_of_file, lambda: load_plan(storage, path))
    if plan.run != run:
        raise PlanDamaged(path, f"it belongs to run {plan.run}, the job to {run}")
    if path != os.path.join(plan.spec.output, PLAN):
        raise PlanDamaged(path, f"it was written for {plan.spec.output}")
    return plan
