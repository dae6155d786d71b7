"""Pins the adapters that a run names, as the model is pinned."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from jobs.context import JobContext
from jobs.context.adapters import ADAPTER
from jobs.errors import UnknownAdapter
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec


def with_named_adapters(context: JobContext, plan: Plan) -> Plan:
    """Return a plan that pins the adapters of its arguments. Raises UnknownAdapter."""
    pinned = {context.adapters.pin(name) for name in _names_in_arguments(plan.spec)}
    return _with_adapters(plan, pinned)


def with_all_adapters(context: JobContext, plan: Plan) -> Plan:
    """Return a plan that pins all adapters that rows may name. Only for previews and dry runs, which keep no plan."""
    if not rows_name_adapters(plan.spec):
        return plan
    return _with_adapters(plan, set(context.adapters.pinned))


def rows_name_adapters(spec: RunSpec) -> bool:
    """Whether each row may name an adapter of its own."""
    return ADAPTER in spec.sampling_columns or spec.input_format == OPENAI_BATCH


def with_adapters_of_rows(context: JobContext, storage: Storage, plan: Plan) -> Plan:
    """Return a plan that pins its rows' adapters too. A row that names an unknown adapter gets an error when asked.

    Reads all rows once. The input's files must be converted already.
    """
    pinned = set(plan.model.adapters)
    known_names = set(context.adapters.names)
    source = row_source(plan.spec, control_tokens=context.model.control_tokens)
    for _, rows in rendered_shards(context, storage, plan, source):
        names: set[str] = set()
        for row in rows:
            if isinstance(row, Row):
                names.update(_names_in_row(row, plan.spec))
        for name in names & known_names:
            with suppress(UnknownAdapter):  # it has gone in between
                pinned.add(context.adapters.pin(name))
    return _with_adapters(plan, pinned)


def _with_adapters(plan: Plan, pinned: set[str]) -> Plan:
    """Return a plan that names these adapters."""
    return replace(plan, model=replace(plan.model, adapters=tuple(sorted(pinned))))


def _names_in_arguments(spec: RunSpec) -> set[str]:
    """Return the adapters that a run's arguments name."""
    names = [spec.sampling.get(ADAPTER)]
    for step in spec.steps:
        names.append(step.sampling.get(ADAPTER))
    return {name for name in names if name is not None}


def _names_in_row(row: Row, spec: RunSpec) -> Iterator[str]:
    """Yield the texts of a row that may name an adapter. A batch file's line may name one as its model."""
    if spec.input_format != OPENAI_BATCH:
        name = row.own_sampling.get(ADAPTER)
        if isinstance(name, str):
            yield name
        return
    try:
        line = json.loads(row.prompt)
    except (ValueError, RecursionError):
        return  # the ask reports what is wrong with the line
    body = line.get("body") if isinstance(line, dict) else None
    if not isinstance(body, dict):
        return
    for key in ("model", ADAPTER):
        name = body.get(key)
        if isinstance(name, str):
            yield name
