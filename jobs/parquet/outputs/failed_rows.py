"""The rows of a part that have an error."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.output_file import part_rows
from jobs.runs.plans.plan import Plan
from jobs.runs.statistics.reasons import Reasons


def failed_rows(storage: Storage, plan: Plan, shard: int) -> Iterator[tuple[int, str]]:
    """Yield each row that has an error, counted over the whole input, with its reason. Raises PartDamaged."""
    name = f"{plan.spec.output_prefix}error"
    for row, values in part_rows(storage, plan, shard, [name]):
        if values[name] is not None:
            yield row, str(values[name])


def part_reasons(storage: Storage, plan: Plan, shard: int) -> Reasons:
    """Return why rows of a part have errors. Raises PartDamaged."""
    reasons = Reasons()
    for row, reason in failed_rows(storage, plan, shard):
        reasons.add(reason, [row])
    return reasons
