"""The rows of a run that takes only new ones: planning writes them beside the plan, as files of their own.

From there on the run knows these alone. Which rows of the input they are lies beside the keys, for whoever is told
of a row that failed.
"""

import os
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.reuse.known_keys import Places
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import kept_name
from jobs.runs.plans.plan import Plan, PlannedFile, cut_shards

#: Rows and bytes of a row group that is written, at most: a footer of many groups takes longer to read than its rows.
GROUP_ROWS, GROUP_BYTES = 1 << 16, 1 << 23


def only_rows(storage: Storage, plan: Plan, readable: Plan, is_kept: npt.NDArray[np.bool_]) -> Plan:
    """Write the rows that are kept, file by file; return the plan of these.

    readable: the plan of all rows, whose inputs can be read. is_kept: of each of them. Raises InputError, DiskFull or
    OutputNotWritable.
    """
    files, groups, start = list[PlannedFile](), list[list[int]](), 0
    rows_of = Counter[int]()
    for shard in readable.shards:
        rows_of[shard.file] += shard.rows
    for number, file in enumerate(plan.files):
        rows = rows_of[number]
        kept = np.flatnonzero(is_kept[start : start + rows])
        files.append(replace(file, kept=len(kept)))
        groups.append([])
        if len(kept):
            groups[-1] = _write(storage, readable.rows_path(file), plan.rows_path(files[-1]), kept)
            write_kept(storage, plan, number, start + kept)
        start += rows
    before: Places = np.cumsum(is_kept) - is_kept
    repeated = tuple(int(before[row]) for row in plan.repeated if row < len(is_kept) and is_kept[row])
    return replace(plan, files=tuple(files), shards=cut_shards(groups, plan.spec.rows_per_shard), repeated=repeated)


def write_kept(storage: Storage, plan: Plan, file: int, kept: Places) -> None:
    """Write which rows, counted over the whole input, a run has in the place of a file's."""
    assert plan.reused is not None
    path = os.path.join(plan.spec.output, kept_name(file, plan.reused.name))
    with writing(path):
        storage.make_folder(os.path.dirname(path))
        with storage.open_output(path) as sink:
            sink.write(kept.astype("<i8").tobytes())


def _write(storage: Storage, source: str, target: str, kept: Places) -> list[int]:
    """Copy rows of a Parquet file, which ascend; return how many each row group has."""
    groups, waiting, start, rows, size = list[int](), list[pa.RecordBatch](), 0, 0, 0
    with writing(target):
        storage.make_folder(os.path.dirname(target))
    with closing(TableReading(storage, source)) as file, writing(target), storage.open_output(target) as sink:
        writer = None
        for batch in file.batches():
            storage.check_interrupted()
            begin, end = np.searchsorted(kept, [start, start + batch.num_rows])
            if begin < end:
                waiting.append(batch.take(pa.array(kept[begin:end] - start)))
                rows, size = rows + int(end - begin), size + waiting[-1].nbytes
            start += batch.num_rows
            is_last = end == len(kept)
            if waiting and (is_last or rows >= GROUP_ROWS or size >= GROUP_BYTES):
                writer = writer or pq.ParquetWriter(sink, batch.schema)
                writer.write_table(pa.Table.from_batches(waiting))
                groups.append(rows)
                waiting, rows, size = [], 0, 0
            if is_last:
                break
        if writer is not None:
            writer.close()
    return groups
