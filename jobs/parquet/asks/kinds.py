"""Which kind of asking a run's arguments name."""

from jobs.context import JobContext
from jobs.parquet.asks.ask import Ask
from jobs.parquet.asks.batch_lines import BatchLines
from jobs.parquet.asks.chain import Chain
from jobs.parquet.asks.embeddings import Embeddings
from jobs.parquet.asks.generate import Generate
from jobs.parquet.asks.labels import Labels, content_free
from jobs.parquet.prompts.prompt_source import RowSource
from jobs.parquet.reuse.row_keys import RowKeys
from jobs.runs.plans.embedding_options import EMBED
from jobs.runs.plans.formats import OPENAI_BATCH
from jobs.runs.plans.plan import Plan


def ask_of(plan: Plan, source: RowSource, context: JobContext) -> Ask:
    """Return what a run asks. source: of its rows. Raises InvalidValue where it cannot be calibrated."""
    ask = _kind_of(plan, source, context)
    ask.keys = RowKeys(plan.spec, ask.before, context.checks.version(plan.spec.repairs))
    return ask


def _kind_of(plan: Plan, source: RowSource, context: JobContext) -> Ask:
    spec = plan.spec
    if spec.input_format == OPENAI_BATCH:
        return BatchLines(plan, context)
    if spec.steps:
        return Chain(spec, plan.seed)
    if spec.labels is not None:
        return Labels(spec, content_free(spec, source) if spec.calibrate else None)
    if spec.task == EMBED:
        return Embeddings(spec)
    return Generate(spec, plan.seed, context.checks)
