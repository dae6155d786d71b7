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
from jobs.parquet.tables.columns import ColumnChoice
from jobs.parquet.tables.row_reader import RowReader
from jobs.runs.plans.formats import PARQUET
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.shard_sizes import ShardSizes

#: Input of at most so many bytes, unpacked, is read: in less than a second.
MAX_READ_BYTES = 1 << 25


def shard_lengths(
    context: JobContext, storage: Storage, plan: Plan, inputs: Inputs, source: RowSource
) -> ShardSizes:
    """Return how many bytes the shards of a plan ask.

    Of small Parquet files the columns that make the prompts are read; of others groups of rows tell, whose
    rows count as equally long.
    """
    if len(plan.shards) == 1:
        return ShardSizes()
    rows = [shard.rows for shard in plan.shards]
    groups = inputs.group_bytes
    if plan.input_format == PARQUET and sum(map(sum, groups)) <= MAX_READ_BYTES:
        with suppress(RunError):  # what cannot be read fails the shards that need it
            return ShardSizes.of(list(_read(context, storage, plan, source)), rows)
    return ShardSizes.of(list(_by_groups(plan, inputs.row_groups, groups)), rows)


def _by_groups(
    plan: Plan, row_groups: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
) -> Iterator[float]:
    rows = [[0, *accumulate(each)] for each in row_groups]
    sizes = [[0, *accumulate(each)] for each in groups]

    def until(file: int, row: int) -> float:
        """Return the bytes of a file's first rows."""
        group = min(bisect_right(rows[file], row) - 1, len(groups[file]) - 1)
        inside = (row - rows[file][group]) / max(1, row_groups[file][group])
        return sizes[file][group] + inside * groups[file][group]

    for shard in plan.shards:
        yield until(shard.file, shard.start + shard.rows) - until(shard.file, shard.start)


def _read(context: JobContext, storage: Storage, plan: Plan, source: RowSource) -> Iterator[float]:
    added = {column.name for column in plan.added_columns}
    choice = ColumnChoice(tuple(name for name in source.columns if name not in added))
    reader, file = None, -1
    try:
        for shard in plan.shards:
            if reader is None or shard.file != file or not reader.reaches(shard):
                if reader is not None:
                    reader.close()
                planned = plan.files[shard.file]
                reader, file = RowReader(storage, planned.path, shard, choice), shard.file
            batches = reader.read(shard, context.check_interrupted)
            yield float(sum(batch.nbytes for batch in batches))
    finally:
        if reader is not None:
            reader.close()
