"""The rows of a run that has not all of its input, or in another order: planning writes them beside the plan.

From there on the run knows these alone, as rows of its first file. Which rows of the input they are lies beside the
keys, for whoever is told of a row that failed.
"""

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa

from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.reuse.known_keys import Places
from jobs.parquet.tables.columns import with_added_values
from jobs.parquet.tables.row_groups import write_groups
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import kept_name
from jobs.runs.plans.plan import Plan, cut_shards


def with_own_rows(storage: Storage, plan: Plan, chosen: Places, batches: Iterable[pa.RecordBatch]) -> Plan:
    """Write rows of the input, whose numbers are `chosen`; return the plan of these. Raises InputError, OutputError."""
    assert plan.reused is not None
    name = kept_name(0, plan.reused.name)
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
            groups = write_groups(sink, None, batches)
        with writing(places), storage.open_output(places) as sink:
            sink.write(chosen.astype("<i8").tobytes())
    return replace(plan, shards=cut_shards([groups], plan.spec.rows_per_shard), sizes=())


def input_rows(
    storage: Storage, plan: Plan, places: Places | None = None
) -> Generator[tuple[int, pa.RecordBatch], None, None]:
    """Yield a run's rows, added columns too, and the first one's number. places: files of none are not read."""
    start = 0
    for file in plan.files:
        if places is not None and np.ptp(np.searchsorted(places, [start, start + file.rows])) == 0:
            start += file.rows
            continue
        with closing(TableReading(storage, plan.rows_path(file))) as reading:
            for batch in reading.batches:
                storage.check_interrupted()
                batch = with_added_values(batch, plan.added_columns, file.values).slice(0, plan.rows - start)
                if batch.num_rows == 0:
                    return
                yield start, batch
                start += batch.num_rows


def rows_at(storage: Storage, plan: Plan, places: Places) -> Iterator[pa.RecordBatch]:
    with closing(input_rows(storage, plan, places)) as rows:
        for start, batch in rows:
            begin, end = np.searchsorted(places, [start, start + batch.num_rows])
            yield batch.take(pa.array(places[begin:end] - start))
            if end == len(places):
                return
