"""Which kind of ask a run's arguments name."""

from collections.abc import Callable, Mapping

from jobs.context import JobContext
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.batch_lines import BatchLines
from jobs.parquet.asks.generate import Chain, Generate
from jobs.parquet.asks.row_keys import RowKeys
from jobs.parquet.asks.scores import Classes, Embeddings, Labels, Relevance, content_free
from jobs.parquet.prompts.sources import row_source
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.option_checks import CLASSIFY, EMBED, GENERATE, RERANK
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec

_OF_TASKS: Mapping[str, type[RowAsk]] = {
    GENERATE: Generate,
    EMBED: Embeddings,
    CLASSIFY: Classes,
    RERANK: Relevance,
}


def kind_of(spec: RunSpec) -> type[RowAsk]:
    if spec.input_format == OPENAI_BATCH:
        return BatchLines
    if spec.steps:
        return Chain
    if spec.labels is not None:
        return Labels
    return _OF_TASKS[spec.task]


def ask_of(plan: Plan, context: JobContext) -> RowAsk:
    spec = plan.spec
    source = row_source(spec, context.check_sampling, context.model.control_tokens)
    prompt = *spec.chat, spec.is_chat
    makers: dict[type[RowAsk], Callable[[], RowAsk]] = {
        BatchLines: lambda: BatchLines(plan, context),
        Chain: lambda: Chain(spec, plan.seed, context.model.control_tokens),
        Labels: lambda: Labels(
            spec, *prompt, content_free(spec, source) if spec.calibrate else None
        ),
        Embeddings: lambda: Embeddings(spec),
        Classes: lambda: Classes(spec),
        Relevance: lambda: Relevance(bool(context.model.classes)),
        Generate: lambda: Generate(spec, plan.seed, *prompt, context.model.control_tokens),
    }
    ask = makers[kind_of(spec)]()
    ask.source = source
    ask.now = None if context.model.clock_formats == () else plan.planned_at
    check = spec.functions_version(context.checks)
    ask.keys = RowKeys(spec, ask.before, check, plan.model.max_model_len, plan.given_seed)
    return ask
