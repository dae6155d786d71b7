"""How many bytes the shards of a new run ask, as far as that is known without much reading."""

from collections.abc import Sequence
from contextlib import suppress

from jobs.context import JobContext
from jobs.errors import RunError
from jobs.parquet.files.storage import Storage
from jobs.parquet.planning.inputs import Inputs
from jobs.parquet.prompts.prompt_source import RowSource
from jobs.parquet.shards.shard_texts import shard_readers
from jobs.runs.plans.formats import PARQUET
from jobs.runs.plans.plan import Plan, Shard

#: Input of at most so many bytes, unpacked, is read: in less than a second.
MAX_READ_BYTES = 1 << 25


def shard_lengths(
    context: JobContext, storage: Storage, plan: Plan, inputs: Inputs, source: RowSource
) -> tuple[int, ...]:
    """Return how many bytes the shards ask: by the columns of small Parquet files, else by groups of rows."""
    if len(plan.shards) < 2:
        return ()
    num_bytes = sum(size for groups in inputs.groups for _, size in groups)
    if plan.input_format == PARQUET and num_bytes <= MAX_READ_BYTES:
        with suppress(RunError):  # what cannot be read fails the shards that need it
            found = shard_readers(storage, plan, source, range(len(plan.shards)))
            return tuple(
                sum(batch.nbytes for batch in reader.read(plan.shards[number], context.check_interrupted))
                for number, reader in found
            )
    return tuple(round(_bytes_in(inputs.groups[shard.file], shard)) for shard in plan.shards)


def _bytes_in(groups: Sequence[tuple[int, int]], shard: Shard) -> float:
    """Return what a shard's rows take, each as many bytes as others of its group."""
    num_bytes, start = 0.0, -shard.skip
    for rows, size in groups[shard.first_group : shard.first_group + shard.num_groups]:
        inside = min(start + rows, shard.rows) - max(start, 0)
        num_bytes += size * inside / max(1, rows)
        start += rows
    return num_bytes
