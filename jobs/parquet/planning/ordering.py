"""A run in another order than its input's: planning writes its rows in that order, and the run knows it alone."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.context import JobContext
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.formats.converted_inputs import convert_inputs
from jobs.parquet.outputs.plan_file import begin_folder
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.new_rows import GROUP_BYTES, GROUP_ROWS, write_kept
from jobs.parquet.shards.shard_texts import rendered_shards
from jobs.parquet.tables.columns import ROW_NUMBER, with_added_values
from jobs.parquet.tables.row_buckets import RowBuckets
from jobs.parquet.tables.row_values import RowProblem
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.plan import Plan, Reused, cut_shards

#: Rows whose prompts are alike in so many characters come together; and of these, those that are alike in more.
BEGINNINGS = (64, 256, 1024, 4096, 16384)

Keys = npt.NDArray[np.uint64]


def in_order(context: JobContext, storage: Storage, plan: Plan) -> Plan:
    """Write a run's rows in the order that its arguments ask for, and return the plan of these.

    Raises InputError, DiskFull or OutputNotWritable.
    """
    spec = plan.spec
    if spec.order is None or not begin_folder(storage, spec.output):
        return plan
    files = {shard.file for shard in plan.shards if shard.rows}
    convert_inputs(storage, plan, files, context.execution_id, context.shard_bytes.limit)
    keys = np.empty((plan.rows, 1 + len(BEGINNINGS)), np.uint64)
    for start, rows in rendered_shards(context, storage, plan, row_source(spec, context.check_sampling)):
        for number, row in enumerate(rows, start):
            keys[number] = _key(row)
    order = np.lexsort(keys.T[::-1])
    first, *others = plan.files
    own = (replace(first, kept=plan.rows), *(replace(file, kept=0) for file in others))
    ordered = replace(plan, files=own, reused=Reused(context.execution_id))
    groups = _write(storage, plan, ordered.rows_path(own[0]), order)
    write_kept(storage, ordered, 0, order)
    return replace(ordered, shards=cut_shards([groups], spec.rows_per_shard))


def _key(row: Row | RowProblem) -> list[int]:
    """Return by what a row is sorted: those that may get long answers first, then by beginnings."""
    if isinstance(row, RowProblem):
        return [0] * (1 + len(BEGINNINGS))
    longest = row.own_sampling.get("max_tokens")
    size = longest.bit_length() if isinstance(longest, int) else 0
    found = (blake2b(row.prompt[:length].encode("utf-8", "surrogatepass"), digest_size=8) for length in BEGINNINGS)
    return [64 - min(size, 63), *(int.from_bytes(each.digest(), "little") for each in found)]


def _write(storage: Storage, plan: Plan, target: str, order: npt.NDArray[np.int64]) -> list[int]:
    """Write the rows of a plan's files in an order; return how many each row group has."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    groups = list[int]()
    with RowBuckets(len(order)) as buckets, writing(target):
        for start, batch in _numbered(storage, plan):
            buckets.add(places[start : start + batch.num_rows], batch)
        storage.make_folder(os.path.dirname(target))
        with storage.open_output(target) as sink:
            writer = None
            for table in buckets.sorted():
                storage.check_interrupted()
                writer = writer or pq.ParquetWriter(sink, table.schema)
                most = max(1, min(GROUP_ROWS, GROUP_BYTES * table.num_rows // max(1, table.nbytes)))
                writer.write_table(table, row_group_size=most)
                groups += [min(most, table.num_rows - start) for start in range(0, table.num_rows, most)]
            if writer is not None:
                writer.close()
    return groups


def _numbered(storage: Storage, plan: Plan) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows that a run has of its files, with their numbers as a column, and the number of the first."""
    start = 0
    for file in plan.files:
        with closing(TableReading(storage, plan.rows_path(file))) as reading:
            for batch in reading.batches():
                storage.check_interrupted()
                batch = with_added_values(batch, plan.added_columns, file.values).slice(0, plan.rows - start)
                numbers = pa.array(range(start, start + batch.num_rows), pa.int64())
                if batch.num_rows == 0:
                    return
                yield start, batch.append_column(ROW_NUMBER, numbers)
                start += batch.num_rows
