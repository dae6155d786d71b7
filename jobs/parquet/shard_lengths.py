"""How many bytes the shards of a new run ask, as far as that is known without much reading."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from jobs.context import JobContext
from jobs.errors import RunError
from jobs.parquet.column_choice import ColumnChoice
from jobs.parquet.decoders import Table
from jobs.parquet.inputs import Inputs
from jobs.parquet.prompt_source import PromptSource
from jobs.parquet.row_reader import RowReader
from jobs.parquet.storage import Storage
from jobs.runs.plans.plan import Plan, PlannedFile
from jobs.runs.plans.shard_sizes import ShardSizes

#: Input of at most so many bytes, unpacked, is read: in less than a second.
MAX_READ_BYTES = 1 << 25


def shard_lengths(
    context: JobContext, storage: Storage, plan: Plan, inputs: Inputs, source: PromptSource
) -> ShardSizes:
    """Return how many bytes the shards of a plan ask.

    Of small inputs the columns that make the prompts are read; of others row groups and blocks of lines tell,
    and their rows count as equally long.
    """
    if len(plan.shards) == 1:
        return ShardSizes()
    rows = [shard.rows for shard in plan.shards]
    groups = [_group_bytes(inputs, number) for number in range(len(plan.files))]
    if sum(map(sum, groups)) <= MAX_READ_BYTES:
        with suppress(RunError):  # what cannot be read fails the shards that need it
            return ShardSizes.of(list(_read(context, storage, plan, source)), rows)
    return ShardSizes.of(list(_by_groups(plan, inputs.row_groups, groups)), rows)


def _group_bytes(inputs: Inputs, number: int) -> Sequence[int]:
    """Return the bytes of each row group of a file, or of each of its blocks."""
    if inputs.group_bytes:
        return inputs.group_bytes[number]
    file, rows = inputs.files[number], inputs.row_groups[number]
    if not file.blocks:
        return [file.size * count // max(1, file.rows) for count in rows]
    begins = [block.byte for block in file.blocks]
    return [*(end - begin for begin, end in pairwise(begins)), _last_block(file, begins)]


def _last_block(file: PlannedFile, begins: Sequence[int]) -> int:
    """Return about how many bytes the last block has; a compressed file's size does not tell."""
    if file.size > begins[-1]:
        return file.size - begins[-1]
    rows = file.blocks[-1].row
    return begins[-1] * (file.rows - rows) // rows if rows else file.size


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


def _read(context: JobContext, storage: Storage, plan: Plan, source: PromptSource) -> Iterator[float]:
    added = {column.name for column in plan.added_columns}
    choice = ColumnChoice(tuple(name for name in source.columns if name not in added))
    reader, file = None, -1
    try:
        for shard in plan.shards:
            if reader is None or shard.file != file or not reader.reaches(shard):
                if reader is not None:
                    reader.close()
                planned = plan.files[shard.file]
                table = Table.of(plan, planned)
                reader, file = (
                    RowReader(storage, planned.path, shard, choice, used=choice, table=table),
                    shard.file,
                )
            batches = reader.read(shard, context.check_interrupted)
            yield float(sum(batch.nbytes for batch in batches))
    finally:
        if reader is not None:
            reader.close()
