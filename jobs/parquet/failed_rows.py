"""The rows of a part that have an error."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import PartDamaged
from ..runs.plan import Plan
from ..runs.reasons import Reasons
from .output_file import BATCH_ROWS, open_part
from .storage import Storage


def failed_rows(storage: Storage, plan: Plan, shard: int) -> Iterator[tuple[int, str]]:
    """Yield each row that has an error, counted over the whole input, with its reason. Raises PartDamaged."""
    name, row = f"{plan.spec.output_prefix}error", plan.first_row(shard)
    with open_part(storage, plan, shard) as file:
        if name not in file.schema_arrow.names:
            raise PartDamaged(plan.part_path(shard), f"it has no column {name!r}")
        for batch in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
            storage.check_interrupted()
            for reason in batch.column(0).to_pylist():
                if reason is not None:
                    yield row, str(reason)
                row += 1


def part_reasons(storage: Storage, plan: Plan, shard: int) -> Reasons:
    """Return why rows of a part have errors. Raises PartDamaged."""
    reasons = Reasons()
    for row, reason in failed_rows(storage, plan, shard):
        reasons.add(reason, [row])
    return reasons
