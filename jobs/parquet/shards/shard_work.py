"""One execution of one shard: reads its rows, publishes its part, ends the run if it was the last."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.context.answers import Answer
from jobs.errors import PlanDamaged, RunError
from jobs.items.runner import Counts, ItemRunner, PromptTokens
from jobs.parquet.asks.kinds import ask_of
from jobs.parquet.asks.row_keys import as_keys, model_mark, row_keys
from jobs.parquet.files.fingerprint import unchanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs import part
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.reuse.old_runs import write_keys
from jobs.parquet.reuse.taken_answers import has_kept, keep_answers, kept_answers, taken_answers
from jobs.parquet.shards.row_items import row_runner
from jobs.parquet.shards.rows_task import RowsTask, check_model, trusted_plan
from jobs.parquet.shards.shard_journal import ShardJournal
from jobs.parquet.shards.shard_texts import ShardTexts, shard_batches, shard_rows
from jobs.parquet.tables.columns import (
    ColumnChoice,
    RowProblem,
    schema_with_json,
    with_added_fields,
    with_own_json,
)
from jobs.parquet.tables.table_reading import RowReader
from jobs.runs.plans.plan import PlannedFile, Shard
from jobs.runs.plans.spec import check_queue_name
from jobs.runs.redis_state.shard_jobs import enqueue_shards
from jobs.runs.redis_state.state import RunState
from jobs.runs.statistics.run_statistics import PartStats


class ShardWork(RowsTask):
    """A shard between open and close. With its part already there it has no requests and only counts it."""

    _journal: ShardJournal | None = None
    _num_escalated = 0
    _num_unasked = 0
    _rows_resumed = 0
    _tokens_resumed = 0

    def __init__(
        self, context: JobContext, folder: RunFolder, shard: int, queue: str | None = None
    ) -> None:
        """Read the rows. queue: the run's, where its second model is asked. Raises RunError or NoRoomYet."""
        self._context, self._folder, self._number = context, folder, shard
        self._queue, self._is_second = queue or context.queue_name, queue is not None
        self._escalates = queue is None and folder.plan.second is not None
        self._started_at = time.time()
        self._files, self._entered = context.files, False
        folder.state.begin(self._started_at)
        if folder.lacks(shard) and not (self._escalates and has_kept(folder, shard)):
            check_model(folder.plan, context.model, self._is_second)
            folder.plan.spec.admit(context.checks)
            context.shard_bytes.check_room()
            self._files.enter(self._file.path)
            self._entered = True
            try:
                self.runner = self._read_rows()
            except BaseException:
                self.close()
                raise

    @classmethod
    def open(
        cls, context: JobContext, run: str, plan: str, shard: int, queue: str | None = None
    ) -> Self:
        """Find the shard in its plan. Raises PlanDamaged when the three do not belong together. queue: see above."""
        if queue is not None:
            check_queue_name(queue)
        storage = Storage.of(context)
        planned = trusted_plan(context, storage, plan, run)
        folder = RunFolder(
            storage, planned, RunState(context.connection, run), context.execution_id
        )
        if type(shard) is not int or shard not in range(len(folder.plan.shards)):
            raise PlanDamaged(
                plan, f"it has {len(folder.plan.shards)} shards, none numbered {brief(shard)}"
            )
        return cls(context, folder, shard, queue)

    def progress(self) -> dict[str, Any]:
        rows = self._shard.rows
        counts = Counts(done=rows) if self.runner is None else self.runner.counts
        return {
            "rows": rows,
            "rows_done": counts.done,
            "rows_open": counts.open,
            "prompt_tokens": counts.prompt_tokens,
            "tokens": counts.generated_tokens,
        }

    def keep(self, so_far: PromptTokens) -> Callable[[], None] | None:
        return None if self._journal is None else self._journal.keep(self.asked, so_far)

    def result(self) -> dict[str, Any]:
        """Publish the part unless one is there, count it, and end the run if it was the last one. Raises RunError."""
        num_low = self._escalate()
        stats = self._publish(self.runner) if self.runner is not None and not num_low else None
        if self._journal is not None:
            self._journal.remove()
        if num_low:
            return {"run": self._folder.plan.run, "shard": self._number, "rows_escalated": num_low}
        if stats is None:  # another execution was first: its part counts, not ours
            stats = self._folder.part_stats(self._number)
        ended = self._folder.record_part(stats, self._queue)
        return {
            "run": stats.run,
            "shard": stats.shard,
            "rows": stats.rows,
            "errors": stats.errors,
            "rows_unasked": None if self.runner is None else self._num_unasked,
            "run_finished": ended,
            "tokens": stats.completion_tokens,
        }

    def close(self) -> None:
        if self._entered:
            self._entered = False
            self._files.leave(self._file.path)
        super().close()

    def _escalate(self) -> int:
        """Leave rows with low margins to the second model; return how many at most, 0 where this one has them all."""
        folder, context, number = self._folder, self._context, self._number
        if not self._escalates or folder.has_part(number):
            return 0
        num_low = self._shard.rows
        if self.runner is not None:
            answers = self.runner.answers()
            own = (self._marks == model_mark(folder.plan.model)).all(axis=1)
            margins = np.array(
                [math.inf if each.error else each.column("margin") for each in answers]
            )
            is_low = own & (margins < (folder.plan.spec.escalate_below or 0))
            high = {row: answers[row] for row in np.flatnonzero(~is_low).tolist()}
            num_low = len(answers) - len(high)
            try:
                if num_low:
                    keep_answers(folder, number, high, self._marks, self._keys)
            except (OSError, RunError):  # as of _publish
                if not folder.has_part(number):
                    raise
                return 0
        if num_low:
            state = RunState(context.connection, folder.plan.run, context.lease)
            enqueue_shards(context, self._queue, folder.plan, state, [number], num_low)
        return num_low

    def _publish(self, runner: ItemRunner[Answer]) -> PartStats | None:
        """Write and publish the part; return None when the place was taken."""
        folder, number = self._folder, self._number
        if folder.has_part(number):
            return None
        answers = runner.answers()
        stats = part.part_stats(
            answers,
            self._context.model,
            run=folder.plan.run,
            shard=number,
            generated_tokens=runner.counts.generated_tokens,
            started_at=self._started_at,
            ended_at=time.time(),
            worker=self._context.worker_name,
            rows_resumed=self._rows_resumed + runner.counts.resumed,
            tokens_resumed=self._tokens_resumed + runner.counts.resumed_tokens,
            rows_escalated=self._num_escalated,
        )
        keys = self._keys.copy()
        keys[[answer.error is not None for answer in answers]] = 0

        def write(sink: Any) -> None:
            self._write(sink, self._with_models(answers), stats)
            # What later runs find the rows by is there before the part.
            write_keys(
                folder.storage, folder.plan, number, keys, self._marks, self._context.execution_id
            )

        try:
            is_first = folder.put_part(number, write)
        except (OSError, RunError):
            # Of two executions the slower one may find the run ended and its own file, or the input, removed.
            if not folder.has_part(number):
                raise
            return None
        return stats if is_first else None

    def _write(self, sink: Any, answers: list[Answer], stats: PartStats) -> None:
        plan, spec = self._folder.plan, self._folder.plan.spec
        with self._reader(part.columns_kept(spec)) as reader:
            found = with_added_fields(reader.schema, plan.added_columns)
            if spec.writes_lines:
                found = schema_with_json(found, plan.as_json)
            schema = part.output_schema(
                found, spec, self._file.path, part.embedding_size(spec, self._context.model)
            )
            part.write_part(sink, schema, self._batches(reader, answers, schema), stats)

    def _with_models(self, answers: list[Answer]) -> list[Answer]:
        first, second = self._folder.plan.model, self._folder.plan.second
        if second is None:
            return answers
        names = {
            model_mark(each).tobytes(): each.name if first.name != second.name else str(each)
            for each in (first, second)
        }
        return [
            each
            if each.error
            else replace(each, columns={**each.columns, part.MODEL: names.get(mark.tobytes())})
            for mark, each in zip(self._marks, answers, strict=True)
        ]

    def _batches(
        self, reader: RowReader, answers: list[Answer], schema: pa.Schema
    ) -> Iterator[pa.Table]:
        start = 0
        for batch in shard_batches(self._context, self._folder.plan, self._shard, reader):
            if self._folder.plan.spec.writes_lines:
                batch = with_own_json(batch)
            yield part.with_answers(
                batch, answers[start : start + batch.num_rows], schema, self._folder.plan.spec
            )
            start += batch.num_rows

    def _read_rows(self) -> ItemRunner[Answer]:
        plan, context = self._folder.plan, self._context
        ask, first_row = ask_of(plan, context), plan.first_row(self._number)
        self._texts = texts = ShardTexts(self._file.path, ask.source.columns, context.shard_bytes)
        with self._reader(ColumnChoice(ask.source.columns)) as reader:
            texts.add(shard_rows(context, plan, self._shard, reader, ask.source))
        rows: list[Row | RowProblem | Answer] = [*texts.gathered()]
        self._keys = row_keys(ask.key_of, rows)
        mark = model_mark(plan.model_of(self._is_second))
        self._marks = np.repeat(mark, len(rows), axis=0)
        if self._is_second:
            found = kept_answers(self._folder.storage, plan, self._number, self._keys)
            self._num_escalated = len(rows) - len(found)
        else:
            found = taken_answers(
                self._folder.storage, plan, self._number, ask.keys.name, self._keys
            )
        for row, (answer, others) in found.items():
            rows[row], self._marks[row] = answer, as_keys(others)
        self._journal = ShardJournal(
            self._folder, self._number, context.model, ask.keys.name, self._keys ^ mark
        )
        left = self._journal.read()
        for row, answer in left.answers.items():
            rows[row] = answer
        runner = row_runner(
            rows, ask, context.checks, lambda row: first_row + row, context.answers, texts.let_go
        )
        self._num_unasked = sum(isinstance(row, RowProblem) for row in rows)
        self._rows_resumed = len(left.answers)
        self._tokens_resumed = left.num_tokens
        runner.resume(left.under_way)
        return runner

    @property
    def _file(self) -> PlannedFile:
        return self._folder.plan.files[self._shard.file]

    @property
    def _shard(self) -> Shard:
        return self._folder.plan.shards[self._number]

    @contextmanager
    def _reader(self, columns: ColumnChoice) -> Iterator[RowReader]:
        """Borrow a reader that has not passed this shard. Raises InputChanged for another file."""
        plan, storage, shard, file = (
            self._folder.plan,
            self._folder.storage,
            self._shard,
            self._file,
        )
        key = (file.path, file.size, file.mtime_ns, columns, plan.rows_path(file))

        def open_reader() -> RowReader:
            with unchanged(storage, plan, file):  # else that is why it cannot be read
                return RowReader(storage, plan.rows_path(file), shard, columns)

        # Then a reader that has seen another file is closed, and not lent on to a shard that finds the planned one.
        with self._files.reader(key, shard, open_reader) as reader, unchanged(storage, plan, file):
            yield reader
