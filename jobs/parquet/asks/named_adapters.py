"""Finds the adapters that a run's arguments and rows name."""

import json
from collections.abc import Iterator

from jobs.context.adapters import ADAPTER
from jobs.parquet.prompts.prompt_source import Row
from jobs.runs.plans.names import OPENAI_BATCH
from jobs.runs.plans.spec import RunSpec


def rows_name_adapters(spec: RunSpec) -> bool:
    """Whether each row may name an adapter of its own."""
    return ADAPTER in spec.sampling_columns or spec.input_format == OPENAI_BATCH


def names_in_arguments(spec: RunSpec) -> set[str]:
    """Return the adapters that a run's arguments name."""
    names = [spec.sampling.get(ADAPTER)]
    for step in spec.steps:
        names.append(step.sampling.get(ADAPTER))
    return {name for name in names if name is not None}


def names_in_row(row: Row, spec: RunSpec) -> Iterator[str]:
    """Yield those texts of a row that may be adapters' names. A batch file's line may name an adapter as its model."""
    if spec.input_format != OPENAI_BATCH:
        name = row.own_sampling.get(ADAPTER)
        if isinstance(name, str):
            yield name
        return
    try:
        line = json.loads(row.prompt)
    except (ValueError, RecursionError):
        return  # the row's answer says what is wrong with the line
    body = line.get("body") if isinstance(line, dict) else None
    if not isinstance(body, dict):
        return
    for key in ("model", ADAPTER):
        name = body.get(key)
        if isinstance(name, str):
            yield name
