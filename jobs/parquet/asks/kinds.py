"""Chooses the class that asks a run's rows, by the run's arguments."""

from jobs.context import JobContext
from jobs.context.adapters import PlannedAdapters
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.batch_lines import BatchLines
from jobs.parquet.asks.chain import Chain
from jobs.parquet.asks.generate import Generate
from jobs.parquet.asks.row_keys import RowKeys
from jobs.parquet.asks.scores import Scores, scoring_of
from jobs.parquet.prompts.sources import row_source
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec


def kind_of(spec: RunSpec) -> type[RowAsk]:
    """Return the subclass of RowAsk that makes the requests for a run's rows."""
    if spec.input_format == OPENAI_BATCH:
        return BatchLines
    if spec.steps:
        return Chain
    if scoring_of(spec) is not None:
        return Scores
    return Generate


def ask_of(plan: Plan, context: JobContext) -> RowAsk:
    """Return the object that asks a run's rows. Raises InvalidJob."""
    spec = plan.spec
    source = row_source(spec, context.check_sampling, context.model.control_tokens)
    ask = kind_of(spec).of_plan(plan, context, source)
    ask.source = source
    ask.adapters = PlannedAdapters(plan.model.adapters)
    # An empty tuple says that the model's template writes no time. None says that nobody knows whether it does.
    may_write_time = context.model.clock_formats != ()
    ask.now = plan.planned_at if may_write_time else None
    ask.keys = RowKeys(
        spec,
        ask.opening_request,
        functions_version=spec.functions_version(context.checks),
        max_model_len=plan.model.max_model_len,
        seed=plan.given_seed,
        adapters=ask.adapters,
    )
    return ask
