"""Answers that rows have before their shard is asked. Logs (answer_log.py) keep these answers until the run ends.

Planning takes answers from earlier runs and puts logs of these answers beside the plan. The first model of a cascade
keeps its answers for the job that asks the second model. The logs of a cascade lie beside the journals, and later runs
read these logs as journals.
"""

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.errors import AnswersDamaged, KeptAnswersLost
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.reuse.answer_log import AnswerLog, Record, log_owner, write_log
from jobs.parquet.tables.row_groups import RowBuckets
from jobs.runs.plans.names import JOURNAL, ROW
from jobs.runs.plans.plan import Plan


def write_taken(storage: Storage, plan: Plan, ask_name: str, buckets: RowBuckets) -> None:
    """Write the logs of all shards for which answers were taken.

    ask_name: a hash of what the run asks; see RowKeys.name. buckets: the records of the answers, where a row has its
    number in the run. In a log, a row has its number in the shard.
    """
    first_rows = np.array([plan.first_row(shard) for shard in range(len(plan.shards))])
    storage.make_folder(os.path.dirname(plan.reused_path(0)))
    for shard, records in _by_shard(buckets, first_rows):
        storage.check_interrupted()
        path = plan.reused_path(shard)
        first_row = pa.scalar(int(first_rows[shard]))
        numbers_in_shard = pc.subtract(records.column(ROW), first_row)
        records = records.set_column(0, ROW, numbers_in_shard)  # ROW is a log's first column
        with writing(path), storage.open_output(path) as sink:
            write_log(sink, log_owner(plan, shard, ask_name), records)


def _by_shard(
    buckets: RowBuckets, first_rows: npt.NDArray[np.int64]
) -> Iterator[tuple[int, pa.Table]]:
    """Yield each shard that has records, with its records."""
    tables: list[pa.Table] = []  # the records of last_shard
    last_shard = -1
    for table in buckets.sorted():
        # shards[i]: the shard of record i
        shards = np.searchsorted(first_rows, table.column(ROW).to_numpy(), "right") - 1
        for shard in map(int, np.unique(shards)):
            if tables and shard != last_shard:
                yield last_shard, pa.concat_tables(tables)
                tables = []
            is_in_shard = pa.array(shards == shard)
            tables.append(table.filter(is_in_shard))
            last_shard = shard
    if tables:
        yield last_shard, pa.concat_tables(tables)


def taken_answers(storage: Storage, plan: Plan, shard: int, log: AnswerLog) -> list[Record]:
    """Return the records that planning has taken from earlier runs.

    Returns no records if the log is damaged, or was written for another version of the check function.
    """
    if plan.reused is None:
        return []
    path = plan.reused_path(shard)
    if storage.stat(path) is None:
        return []
    return log.read_if_whole(storage, path)


def _kept_path(plan: Plan, shard: int) -> str:
    """Return the path of the log that keeps the answers of a cascade's first model."""
    return os.path.join(plan.spec.output, JOURNAL, f"_kept.{shard:05d}.answers")


def has_kept(folder: RunFolder, shard: int) -> bool:
    """Whether the first model's answers are kept for the second model's job."""
    return folder.storage.stat(_kept_path(folder.plan, shard)) is not None


def keep_answers(folder: RunFolder, shard: int, log: AnswerLog, records: Sequence[Record]) -> None:
    """Keep the first model's answers for the second model's job, unless another execution has done so."""
    path = _kept_path(folder.plan, shard)
    folder.storage.put(path, folder.execution_id, lambda sink: log.write(sink, records))


def kept_answers(storage: Storage, plan: Plan, shard: int, log: AnswerLog) -> list[Record]:
    """Return the records that the first model's job has kept. Raises KeptAnswersLost."""
    path = _kept_path(plan, shard)
    try:
        return log.read(storage, path)
    except AnswersDamaged as error:
        raise KeptAnswersLost(path, error.argument("reason")) from None
