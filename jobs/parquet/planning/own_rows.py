"""The rows of a run that has not all of its input, or in another order: planning writes them beside the plan.

From there on the run knows these alone, as rows of its first file. Which rows of the input they are lies beside the
keys, for whoever is told of a row that failed.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from jobs.context import JobContext
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.known_keys import Places
from jobs.parquet.shards.shard_texts import rendered_shards, shard_batches, shard_readers
from jobs.parquet.tables.columns import ROW_NUMBER
from jobs.parquet.tables.row_groups import RowBuckets, write_groups
from jobs.parquet.tables.row_values import RowProblem
from jobs.runs.plans.names import kept_name
from jobs.runs.plans.plan import Plan, Reused, cut_shards


def with_own_rows(context: JobContext, storage: Storage, plan: Plan, chosen: Places) -> Plan:
    """Write rows of the input, whose numbers are `chosen`; return the plan of these. Raises InputError, OutputError."""
    assert plan.reused is not None
    before, name = plan, kept_name(0, plan.reused.name)
    first, *others = plan.files
    first = replace(first, kept=len(chosen))
    repeated = tuple(np.flatnonzero(np.isin(chosen, plan.repeated)).tolist())
    plan = replace(plan, files=(first, *(replace(file, kept=0) for file in others)), repeated=repeated)
    groups = list[int]()
    if len(chosen):
        target, places = plan.rows_path(first), os.path.join(plan.spec.output, name)
        for path in (target, places):
            storage.make_folder(os.path.dirname(path))
        with writing(target), storage.open_output(target) as sink:
            groups = write_groups(sink, None, _chosen_rows(context, storage, before, chosen))
        with writing(places), storage.open_output(places) as sink:
            sink.write(chosen.astype("<i8").tobytes())
    return replace(plan, shards=cut_shards([groups], plan.spec.rows_per_shard), sizes=())


def _chosen_rows(context: JobContext, storage: Storage, plan: Plan, chosen: Places) -> Iterator[pa.RecordBatch]:
    """Yield rows of the input in the order of their numbers in `chosen`; shards that have none of them are not read."""
    places = np.full(plan.rows, -1, np.int64)
    places[chosen] = np.arange(len(chosen))
    firsts = [plan.first_row(shard) for shard in range(len(plan.shards))]
    shards = np.unique(np.searchsorted(firsts, chosen, "right") - 1).tolist()
    with RowBuckets(len(chosen)) as buckets:
        for number, reader in shard_readers(context, storage, plan, shards):
            start = firsts[number]
            for batch in shard_batches(context, plan, plan.shards[number], reader):
                numbers = np.arange(start, start := start + batch.num_rows)
                if plan.spec.order is not None:
                    batch = batch.append_column(ROW_NUMBER, pa.array(numbers))
                is_chosen = places[numbers] >= 0
                buckets.add(places[numbers[is_chosen]], batch.filter(pa.array(is_chosen)))
        for table in buckets.sorted():
            storage.check_interrupted()
            yield from table.to_batches()


#: Rows whose prompts are alike in so many characters come together; and of these, those that are alike in more.
BEGINNINGS = (64, 256, 1024, 4096, 16384)


def in_order(context: JobContext, storage: Storage, plan: Plan) -> Plan:
    """Write a run's rows in the order that it asks for, where it does; return the plan of these."""
    spec = plan.spec
    if spec.order is None:
        return plan
    keys = np.empty((plan.rows, 1 + len(BEGINNINGS)), np.uint64)
    for start, rows in rendered_shards(context, storage, plan, row_source(spec, context.check_sampling)):
        for number, row in enumerate(rows, start):
            keys[number] = _key(row)
    order = np.lexsort(keys.T[::-1])
    return with_own_rows(context, storage, replace(plan, reused=Reused(context.execution_id)), order)


def _key(row: Row | RowProblem) -> list[int]:
    if isinstance(row, RowProblem):
        return [0] * (1 + len(BEGINNINGS))
    longest = row.own_sampling.get("max_tokens")
    size = longest.bit_length() if isinstance(longest, int) else 0
    found = (blake2b(row.prompt[:length].encode("utf-8", "surrogatepass"), digest_size=8) for length in BEGINNINGS)
    return [64 - min(size, 63), *(int.from_bytes(each.digest(), "little") for each in found)]
