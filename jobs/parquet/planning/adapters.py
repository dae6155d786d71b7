"""Pins the adapters that a run names: the plan records their exact files, as it records the exact model."""

from contextlib import suppress
from dataclasses import replace

from jobs.context import JobContext
from jobs.errors import UnknownAdapter
from jobs.parquet.asks.named_adapters import names_in_arguments, names_in_row, rows_name_adapters
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.runs.plans.plan import Plan


def with_named_adapters(context: JobContext, plan: Plan) -> Plan:
    """Return a plan that pins the adapters of its arguments. Raises UnknownAdapter."""
    pinned = {context.adapters.pin(name) for name in names_in_arguments(plan.spec)}
    return _with_adapters(plan, pinned)


def with_all_adapters(context: JobContext, plan: Plan) -> Plan:
    """Return a plan that pins all adapters that rows may name. Only for previews and dry runs, which keep no plan."""
    if not rows_name_adapters(plan.spec):
        return plan
    return _with_adapters(plan, set(context.adapters.pinned))


def with_adapters_of_rows(context: JobContext, storage: Storage, plan: Plan) -> Plan:
    """Return the plan, which now also pins the adapters that its rows name.

    A row that names an unknown adapter gets an error when the run asks it, not here. Reads all rows once. The input's
    files must be converted already.
    """
    pinned = set(plan.model.adapters)
    known_names = set(context.adapters.names)
    source = row_source(plan.spec, control_tokens=context.model.control_tokens)
    for _, rows in rendered_shards(context, storage, plan, source):
        names: set[str] = set()
        for row in rows:
            if isinstance(row, Row):
                names.update(names_in_row(row, plan.spec))
        for name in names & known_names:
            with suppress(UnknownAdapter):  # the adapter was removed meanwhile
                pinned.add(context.adapters.pin(name))
    return _with_adapters(plan, pinned)


def _with_adapters(plan: Plan, pinned: set[str]) -> Plan:
    """Return a plan that pins these adapters and no others. pinned: the adapters' pinned texts."""
    model = replace(plan.model, adapters=tuple(sorted(pinned)))
    return replace(plan, model=model)
