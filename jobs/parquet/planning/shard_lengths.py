"""How many bytes the shards of a new run ask, as far as that is known without much reading."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from jobs.context import JobContext
from jobs.errors import RunError
from jobs.parquet.files.storage import Storage
from jobs.parquet.planning.inputs import Inputs
from jobs.parquet.prompts.prompt_source import RowSource
from jobs.parquet.shards.shard_texts import shard_batches
from jobs.runs.plans.formats import PARQUET
from jobs.runs.plans.plan import Plan

#: Input of at most so many bytes, unpacked, is read: in less than a second.
MAX_READ_BYTES = 1 << 25


def shard_lengths(
    context: JobContext, storage: Storage, plan: Plan, inputs: Inputs, source: RowSource
) -> tuple[int, ...]:
    """Return how many bytes the shards ask: by the columns of small Parquet files, else by groups of rows."""
    if len(plan.shards) < 2:
        return ()
    groups = inputs.group_bytes
    if plan.input_format == PARQUET and sum(map(sum, groups)) <= MAX_READ_BYTES:
        with suppress(RunError):  # what cannot be read fails the shards that need it
            found = shard_batches(context, storage, plan, source, range(len(plan.shards)))
            return tuple(sum(batch.nbytes for batch in batches) for _, batches in found)
    return tuple(map(round, _by_groups(plan, inputs.row_groups, groups)))


def _by_groups(plan: Plan, row_groups: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> Iterator[float]:
    rows = [[0, *accumulate(each)] for each in row_groups]
    sizes = [[0, *accumulate(each)] for each in groups]

    def until(file: int, row: int) -> float:
        """Return the bytes of a file's first rows."""
        group = min(bisect_right(rows[file], row) - 1, len(groups[file]) - 1)
        inside = (row - rows[file][group]) / max(1, row_groups[file][group])
        return sizes[file][group] + inside * groups[file][group]

    for shard in plan.shards:
        yield until(shard.file, shard.start + shard.rows) - until(shard.file, shard.start)
