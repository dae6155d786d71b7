"""One shard's rows that have an error, asked once more: their answers take the errors' place in its part.

A part is replaced by a rename, and an answer never given up for an error. Whoever puts a part in place takes
back the run's end behind the rename: what an execution that ended the run meanwhile has read of the parts is
then not published, or is written anew by this one, which counts the part last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.common.version import code_version
from jobs.context import JobContext
from jobs.context.answers import Answer
from jobs.errors import PartDamaged, PathSwapped, RunBusy
from jobs.parquet.outputs.output_file import failed_rows, open_part
from jobs.parquet.outputs.part import OWN_KEYS, answer_column, answer_fields, write_part
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.shards.rows_task import AgainTask, opened_folder
from jobs.parquet.tables.columns import ColumnChoice
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.statistics.part_stats import PartStats

#: Of a part's columns, what its statistics are the sums of.
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


class RetryWork(AgainTask):
    """The failed rows of a shard between open and close."""

    def __init__(
        self, context: JobContext, folder: RunFolder, shard: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Read which rows failed, and what they ask. Raises RunError or NoRoomYet."""
        self._context, self._folder, self._number, self._clock = context, folder, shard, clock
        self._storage, plan = folder.storage, folder.plan
        self._temporary = folder.temporary_replacement(shard)
        self._began_at = clock()
        folder.state.begin(self._began_at)
        context.shard_bytes.check_room()
        self._old = folder.part_stats(shard)
        self._rows = [row for row, _ in failed_rows(self._storage, plan, shard)]
        self.ask(context, self._storage, plan, self._rows)

    @classmethod
    def open(cls, context: JobContext, run: str, plan_path: str, shard: int) -> RetryWork:
        """Find the shard in its plan. Raises PlanDamaged or PartDamaged."""
        folder = opened_folder(context, plan_path, run)
        if shard >= len(folder.plan.shards) or not folder.has_part(shard):
            raise PartDamaged(folder.plan.part_path(shard), "it is gone")
        return cls(context, folder, shard)

    def progress(self) -> dict[str, Any]:
        """Return the shard's rows, those that have an answer or are asked no more, and tokens generated."""
        kept = self._old.rows - len(self._rows)
        return {"rows": self._old.rows, "rows_done": kept + self.asked.rows_done, "tokens": self.asked.generated_tokens}

    def result(self) -> dict[str, Any]:
        """Put the part in place with the new answers, count it, and end the run if it was the last one. Raises
        RunError."""
        answers = dict(zip(self._rows, self.asked.answers(), strict=True))
        while answers and not self._publish(answers):
            self._context.check_interrupted()  # another execution's part is there: what it lacks is put in
        self._folder.withdraw_end(anyway=True)
        ended = self._folder.record_replaced_part(self._number, self._context.queue_name)
        stats = self._folder.part_stats(self._number)
        return {**self.told(stats, ended), "rows_retried": len(self._rows)}

    def close(self) -> None:
        super().close()
        self._storage.remove(self._temporary)

    def _publish(self, answers: dict[int, Answer]) -> bool:
        """Put the part with answers for its errors in place; return False where another came there first."""
        path = self._folder.plan.part_path(self._number)
        before = self._storage.stat(path)
        try:
            self._write_merged(answers)
        except PathSwapped:  # a store's object, replaced while it was read
            if self._storage.stat(path) == before:
                raise
            return False
        self._check_held()
        return self._folder.replace_part(self._temporary, self._number, lambda: self._storage.stat(path) == before)

    def _write_merged(self, answers: dict[int, Answer]) -> None:
        """Write the part that is there with answers for its errors, beside it."""
        stats = self._stats(self._folder.part_stats(self._number), answers)
        with open_part(self._storage, self._folder.plan, self._number) as file:
            kept = {k: v for k, v in (file.schema.metadata or {}).items() if k not in OWN_KEYS}
            schema = file.schema.with_metadata(kept or None)
            batches = (each.replace_schema_metadata(kept) for each in self._merged(file, answers))
            write_part(self._storage, self._temporary, schema, batches, stats)

    def _check_held(self) -> None:
        lease = self._context.lease
        if lease is not None and self._context.connection.zscore(lease.key, lease.member) is None:
            raise RunBusy(self._folder.plan.run)

    def _stats(self, old: PartStats, answers: dict[int, Answer]) -> PartStats:
        """Return what the part has with the answers put in."""
        sums, errors, rows = dict.fromkeys(_COUNTS, 0), 0, 0
        names = {name: self._name(name) for name in ("error", *_COUNTS)}
        columns = ColumnChoice(tuple(names.values()))
        with open_part(self._storage, self._folder.plan, self._number, columns) as file:
            for batch in self._merged(file, answers):
                rows += batch.num_rows
                errors += batch.num_rows - batch.column(names["error"]).null_count
                for name in _COUNTS:
                    column = batch.column(names[name])
                    values = column.flatten() if pa.types.is_list(column.type) else column
                    sums[name] += pc.sum(values).as_py() or 0
        model = self._context.model
        return replace(
            old.retried(self._clock() - self._began_at, self.asked.generated_tokens),
            rows=rows,
            errors=errors,
            prompt_tokens=sums["prompt_tokens"],
            completion_tokens=sums["completion_tokens"],
            cached_tokens=sums["cached_tokens"],
            attention_backend=model.attention_backend,
            version=code_version(),
        )

    def _merged(self, file: TableReading, answers: dict[int, Answer]) -> Iterator[pa.RecordBatch]:
        """Yield a part's rows, with an answer where there was an error."""
        plan = self._folder.plan
        row = plan.first_row(self._number)
        ours = {self._name(field.name): field.name for field in answer_fields(plan.spec)}
        for batch in file.batches():
            self._context.check_interrupted()
            errors = batch.column(self._name("error"))
            places = [n for n in range(batch.num_rows) if row + n in answers and errors[n].is_valid]
            arrays = []
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if name in ours and places:
                    values = [answers[row + n].column(ours[name]) for n in places]
                    column = _replaced(column, places, answer_column(values, column.type).combine_chunks())
                arrays.append(column)
            yield pa.RecordBatch.from_arrays(arrays, schema=batch.schema.remove_metadata())
            row += batch.num_rows

    def _name(self, column: str) -> str:
        return f"{self._folder.plan.spec.output_prefix}{column}"


def _replaced(column: pa.Array, places: Sequence[int], values: pa.Array) -> pa.Array:
    """Return a column with values at some places."""
    order = list(range(len(column)))
    for number, place in enumerate(places):
        order[place] = len(column) + number
    return pa.concat_arrays([column, values]).take(pa.array(order, pa.int64()))
