"""A run in another order than its input's: planning writes its rows in that order, and the run knows it alone."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from jobs.context import JobContext
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.known_keys import Places
from jobs.parquet.reuse.own_rows import input_rows, with_own_rows
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.columns import ROW_NUMBER
from jobs.parquet.tables.row_buckets import RowBuckets
from jobs.parquet.tables.row_values import RowProblem
from jobs.runs.plans.plan import Plan, Reused

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
    ordered = replace(plan, reused=Reused(context.execution_id))
    return with_own_rows(storage, ordered, order, _sorted_rows(storage, plan, order))


def _key(row: Row | RowProblem) -> list[int]:
    if isinstance(row, RowProblem):
        return [0] * (1 + len(BEGINNINGS))
    longest = row.own_sampling.get("max_tokens")
    size = longest.bit_length() if isinstance(longest, int) else 0
    found = (blake2b(row.prompt[:length].encode("utf-8", "surrogatepass"), digest_size=8) for length in BEGINNINGS)
    return [64 - min(size, 63), *(int.from_bytes(each.digest(), "little") for each in found)]


def _sorted_rows(storage: Storage, plan: Plan, order: Places) -> Iterator[pa.RecordBatch]:
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    with RowBuckets(len(order)) as buckets:
        for start, batch in input_rows(storage, plan):
            numbers = np.arange(start, start + batch.num_rows)
            buckets.add(places[numbers], batch.append_column(ROW_NUMBER, pa.array(numbers)))
        for table in buckets.sorted():
            storage.check_interrupted()
            yield from table.to_batches()
