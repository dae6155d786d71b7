"""Which source of prompts a run's arguments name."""

from collections.abc import Callable, Mapping
from typing import Any

from jobs.context import accept_any_sampling
from jobs.parquet.prompts.batch_requests import BatchSource
from jobs.parquet.prompts.jinja_source import JinjaSource
from jobs.parquet.prompts.prompt_chain import ChainSource
from jobs.parquet.prompts.prompt_source import (
    CheckedSource,
    MessagesColumn,
    PromptColumn,
    PromptSource,
    TemplateSource,
)
from jobs.parquet.prompts.row_sampling import SampledSource
from jobs.runs.plans.formats import OPENAI_BATCH
from jobs.runs.plans.prompt_steps import Template
from jobs.runs.plans.spec import RunSpec


def prompt_source(
    spec: RunSpec, check_sampling: Callable[[Mapping[str, Any]], None] = accept_any_sampling
) -> PromptSource:
    """Return the source that a run's arguments name. Raises InvalidJob, as a plan may be made by hand.

    check_sampling: see JobContext; asked of the values that rows bring.
    """
    if spec.input_format == OPENAI_BATCH:
        return BatchSource()
    source = _of_prompts(spec)
    if not spec.sampling_columns:
        return source
    return SampledSource(source, spec.sampling_columns, spec.chat[0], check_sampling)


def read_source(
    spec: RunSpec, check_sampling: Callable[[Mapping[str, Any]], None] = accept_any_sampling
) -> PromptSource:
    """Return the same with what a function that checks gets of each row."""
    source = prompt_source(spec, check_sampling)
    if spec.repairs.function is None:
        return source
    return CheckedSource(source, spec.check_columns or ())


def _of_prompts(spec: RunSpec) -> PromptSource:
    if spec.steps:
        return ChainSource(spec.steps, spec.defaults)
    if spec.template is not None and spec.template_format == "jinja":
        return JinjaSource(spec.template, spec.defaults)
    if spec.template is not None:
        template = Template.parse(spec.template)
        template.check_cost(spec.rows_per_shard)
        return TemplateSource(template, spec.defaults)
    if spec.messages_column is not None:
        return MessagesColumn(spec.messages_column)
    assert spec.prompt_column is not None
    return PromptColumn(spec.prompt_column)
