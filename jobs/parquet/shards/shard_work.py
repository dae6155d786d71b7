"""One execution of one shard: reads the shard's rows, publishes its part, and ends the run after the last part."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
from redis.exceptions import RedisError

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.context.answers import Answer
from jobs.errors import PlanDamaged, RunError
from jobs.items.runner import Counts, ItemRunner, PromptTokens
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.asks.row_keys import as_keys, model_mark, row_keys, whole_keys
from jobs.parquet.files.fingerprint import unchanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs import part
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import RowSource
from jobs.parquet.reuse.answer_log import AnswerLog, Record, log_owner
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
from jobs.tasks import Request


class ShardWork(RowsTask):
    """An open shard. If its part is there already, no row is asked, and the part is only counted."""

    _journal: ShardJournal | None = None
    #: How many rows the first model has left to the second one.
    _num_escalated = 0
    #: How many rows cannot be asked, because no prompt could be made of them.
    _num_unasked = 0
    #: How many answers earlier executions have left in the journal, and how many tokens were generated for them.
    _rows_resumed = 0
    _tokens_resumed = 0

    def __init__(
        self, context: JobContext, folder: RunFolder, shard: int, queue: str | None = None
    ) -> None:
        """Read the rows. Raises RunError or NoRoomYet.

        queue: None unless this job asks a cascade's second model. Such a job may be on another queue than the run, so
        it is told the run's queue.
        """
        self._context = context
        self._folder = folder
        self._shard_number = shard
        self._queue = queue or context.queue_name
        self._is_second = queue is not None
        #: Whether this job leaves rows with low margins to the second model.
        self._escalates = queue is None and folder.plan.second is not None
        self._started_at = time.time()
        self._waited_s: float | None = None  # None until the first request
        self._has_entered = False  # whether other shards know that this shard reads its file
        self._deadline = folder.state.begin(self._started_at)
        # Once the first model's answers are kept, this job only enqueues the second model's job.
        has_first_answers = self._escalates and has_kept(folder, shard)
        if folder.lacks(shard) and not has_first_answers:
            check_model(folder.plan, context, self._is_second)
            folder.plan.spec.admit(context.checks)
            context.shard_bytes.check_room()
            context.files.enter(self._file.path)
            self._has_entered = True
            try:
                self.runner = self._read_rows()
            except BaseException:
                self.close()
                raise

    @classmethod
    def open(
        cls, context: JobContext, run: str, plan: str, shard: int, queue: str | None = None
    ) -> Self:
        """Open a shard of a run. queue: see `__init__`. Raises PlanDamaged if the plan is of another run."""
        if queue is not None:
            check_queue_name(queue)
        storage = Storage.of(context)
        run_plan = trusted_plan(context, storage, plan, run)
        state = RunState(context.connection, run)
        folder = RunFolder(storage, run_plan, state, context.execution_id)
        num_shards = len(run_plan.shards)
        if type(shard) is not int or shard not in range(num_shards):
            raise PlanDamaged(plan, f"it has {num_shards} shards, none numbered {brief(shard)}")
        return cls(context, folder, shard, queue)

    def requests(self) -> Iterator[Request]:
        """Yield the runner's requests, and note for how long the shard has waited before the first one."""
        for request in super().requests():
            if self._waited_s is None:
                self._waited_s = max(0.0, time.time() - self._started_at)
            yield request

    def progress(self) -> dict[str, Any]:
        """Return how many rows are done, and how many tokens they took."""
        num_rows = self._shard.rows
        counts = Counts(done=num_rows)  # without a runner, no row is left to ask
        if self.runner is not None:
            counts = self.runner.counts
        return {
            "rows": num_rows,
            "rows_done": counts.done,
            "rows_open": counts.open,
            "prompt_tokens": counts.prompt_tokens,
            "tokens": counts.generated_tokens,
        }

    def keep(self, tokens: PromptTokens) -> Callable[[], None] | None:
        """Return a function that writes an entry of the journal, and then reads the run's deadline again.

        Returns None if there is nothing to write and all rows have begun. The deadline matters only to rows that have
        not begun.
        """
        if self._journal is None:
            return None
        write = self._journal.keep(self.required_runner, tokens)
        if write is None and not self.required_runner.has_more:
            return None

        def write_and_read() -> None:
            """Write the entry, if there is one, and read the deadline."""
            if write is not None:
                write()
            self._read_deadline()

        return write_and_read

    def result(self) -> dict[str, Any]:
        """Publish the part unless it is there, count it, and end the run if it was the last part. Raises RunError.

        If a cascade's second model is to be asked, the second model's job does all this later.
        """
        num_escalated = self._escalate()
        stats = None
        if self.runner is not None and not num_escalated:
            stats = self._publish(self.runner)
        if self._journal is not None:
            self._journal.remove()
        if num_escalated:
            return {
                "run": self._folder.plan.run,
                "shard": self._shard_number,
                "rows_escalated": num_escalated,
            }

        if stats is None:  # another execution was first, and its part counts
            stats = self._folder.part_stats(self._shard_number)
        has_ended = self._folder.record_part(stats, self._queue)
        num_unasked = None if self.runner is None else self._num_unasked
        return {
            "run": stats.run,
            "shard": stats.shard,
            "rows": stats.rows,
            "errors": stats.errors,
            "rows_unasked": num_unasked,
            "run_finished": has_ended,
            "tokens": stats.completion_tokens,
        }

    def close(self) -> None:
        """Free the memory of unanswered rows, and tell other shards that this shard no longer reads its file."""
        if self._has_entered:
            self._has_entered = False
            self._context.files.leave(self._file.path)
        super().close()

    def _read_deadline(self) -> None:
        """Read the run's deadline again, because a new submission may have changed it."""
        with suppress(RedisError):  # then the known deadline stays
            self._deadline = self._folder.state.deadline()

    def _is_over(self) -> bool:
        """Whether the run's deadline has passed."""
        return self._deadline is not None and time.time() >= self._deadline

    def _escalate(self) -> int:
        """Enqueue the job that asks the second model about rows with low margins.

        Returns how many rows this job will ask at most. If there are no such rows, or if the part is there, enqueues
        nothing and returns 0.
        """
        folder = self._folder
        number = self._shard_number
        if not self._escalates or folder.has_part(number):
            return 0

        # If an earlier execution has kept the answers, this execution has no runner and does not know which margins are
        # low. Then the number of all rows is returned.
        num_escalated = self._shard.rows
        if self.runner is not None:
            records = self._records_to_keep(self.runner.answers())
            num_escalated -= len(records)
            if not num_escalated:
                return 0
            try:
                keep_answers(folder, number, self._log, records)
            except (OSError, RunError):
                # If two executions write, the slower execution may find that the run has ended, and that the folder
                # of journals is removed.
                if not folder.has_part(number):
                    raise
                return 0

        state = RunState(self._context.connection, folder.plan.run, self._context.lease)
        enqueue_shards(self._context, self._queue, folder.plan, state, [number], num_escalated)
        return num_escalated

    def _records_to_keep(self, answers: Sequence[Answer]) -> list[Record]:
        """Return a record of each answer that the second model's job keeps. That job asks the other rows again.

        The first model's answers with a low margin are not kept. An error has no margin, and is kept. An answer that
        another model gave in an earlier run is also kept.
        """
        first_model_hash = model_mark(self._folder.plan.model).tobytes()
        bound = self._folder.plan.spec.escalate_below or 0
        records = []
        for row, answer in enumerate(answers):
            model_hash = self._model_hashes[row].tobytes()
            margin_counts = model_hash == first_model_hash and answer.error is None
            is_low = margin_counts and answer.column("margin") < bound
            if not is_low:
                records.append(Record(row, model_hash, answer))
        return records

    def _publish(self, runner: ItemRunner[Answer]) -> PartStats | None:
        """Write and publish the part; return None if another execution's part is there."""
        folder = self._folder
        number = self._shard_number
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
            waited_s=self._waited_s or 0.0,
            ended_at=time.time(),
            worker=self._context.worker_name,
            rows_resumed=self._rows_resumed + runner.counts.resumed,
            tokens_resumed=self._tokens_resumed + runner.counts.resumed_tokens,
            rows_escalated=self._num_escalated,
        )
        keys = whole_keys(self._log.keys, self._model_hashes)
        has_failed = [answer.error is not None for answer in answers]
        keys[has_failed] = 0  # a row without a key is never found by a later run

        def write(sink: Any) -> None:
            """Write the part, then the keys. The part gets its name last."""
            self._write(sink, self._with_models(answers), stats)
            # Later runs find the rows by these keys, so the keys must be there before the part has its name.
            write_keys(
                folder.storage, folder.plan, number, keys, self._model_hashes, folder.execution_id
            )

        try:
            is_first = folder.put_part(number, write)
        except (OSError, RunError):
            # If two executions write the part, the slower execution may find that the run has ended, and that its
            # temporary file or the input is removed.
            if not folder.has_part(number):
                raise
            return None
        return stats if is_first else None

    def _write(self, sink: Any, answers: list[Answer], stats: PartStats) -> None:
        """Write the part: the input's columns, which are read again, and the answers."""
        plan = self._folder.plan
        spec = plan.spec
        with self._reader(part.columns_kept(spec)) as reader:
            input_schema = with_added_fields(reader.schema, plan.added_columns)
            if spec.writes_lines:
                input_schema = schema_with_json(input_schema, plan.as_json)
            embedding_size = part.embedding_size(spec, self._context.model)
            schema = part.output_schema(input_schema, spec, self._file.path, embedding_size)
            part.write_part(sink, schema, self._batches(reader, answers, schema), stats)

    def _with_models(self, answers: list[Answer]) -> list[Answer]:
        """Return the answers. In a cascade, each answer without an error gets the name of its model."""
        first = self._folder.plan.model
        second = self._folder.plan.second
        if second is None:
            return answers
        have_same_name = first.name == second.name
        # The name of each model, by a hash of the model.
        names_by_hash: dict[bytes, str] = {}
        for model in (first, second):
            # `str(model)` also shows the dtype and the fingerprint, which tell two models of one name apart.
            name = str(model) if have_same_name else model.name
            names_by_hash[model_mark(model).tobytes()] = name
        named_answers = []
        for model_hash, answer in zip(self._model_hashes, answers, strict=True):
            if answer.error is None:
                # The name is None if the answer comes from an earlier run that had another model.
                model_name = names_by_hash.get(model_hash.tobytes())
                answer = replace(answer, columns={**answer.columns, part.MODEL: model_name})
            named_answers.append(answer)
        return named_answers

    def _batches(
        self, reader: RowReader, answers: list[Answer], schema: pa.Schema
    ) -> Iterator[pa.Table]:
        """Yield the rows of the part."""
        spec = self._folder.plan.spec
        start = 0
        for batch in shard_batches(self._context, self._folder.plan, self._shard, reader):
            if spec.writes_lines:
                batch = with_own_json(batch)
            end = start + batch.num_rows
            yield part.with_answers(batch, answers[start:end], schema, spec)
            start = end

    def _read_rows(self) -> ItemRunner[Answer]:
        """Read the rows, and the answers that rows already have; return the runner of all rows."""
        plan = self._folder.plan
        context = self._context
        ask = ask_of(plan, context)
        texts = self._render_rows(ask.source)
        rows: list[Row | RowProblem | Answer] = [*texts.take_rows()]

        keys = row_keys(ask.key_of, rows)
        model_hash = model_mark(plan.model_of(self._is_second))
        embedding_size = part.embedding_size(plan.spec, context.model)
        fields = kind_of(plan.spec).fields(plan.spec, embedding_size)
        self._log = AnswerLog(log_owner(plan, self._shard_number, ask.keys.name), keys, fields)
        self._journal = ShardJournal(
            self._folder, self._shard_number, self._log, model_hash.tobytes()
        )
        journalled = self._journal.read()
        #: For each row, a hash of the model that answers it, or has answered it already.
        self._model_hashes = np.repeat(model_hash, len(rows), axis=0)
        earlier_records = self._earlier_records(len(rows))
        for record in (*earlier_records, *journalled.answers.values()):
            assert record.answer is not None
            rows[record.row] = record.answer
            self._model_hashes[record.row] = as_keys(record.model_hash)

        first_row = plan.first_row(self._shard_number)
        runner = row_runner(
            rows,
            ask,
            context.checks,
            number_of=lambda place: first_row + place,
            memo=context.answers,
            memo_keys=whole_keys(keys, model_hash),
            let_go=texts.let_go,
            is_over=self._is_over,
        )
        self._num_unasked = sum(isinstance(row, RowProblem) for row in rows)
        self._rows_resumed = len(journalled.answers)
        self._tokens_resumed = journalled.num_tokens
        runner.resume(journalled.under_way)
        return runner

    def _render_rows(self, source: RowSource) -> ShardTexts:
        """Read and render the shard's rows.

        `shard_bytes` counts each row's bytes until the row's texts are no longer needed, or this task is closed.
        """
        texts = ShardTexts(self._file.path, source.columns, self._context.shard_bytes)
        self._texts = texts  # freed by `close`, even if an error is raised below
        with self._reader(ColumnChoice(source.columns)) as reader:
            plan = self._folder.plan
            texts.add(shard_rows(self._context, plan, self._shard, reader, source))
        return texts

    def _earlier_records(self, num_rows: int) -> list[Record]:
        """Return records of the answers that planning took from earlier runs, or that the first model's job kept."""
        storage = self._folder.storage
        plan = self._folder.plan
        if not self._is_second:
            return taken_answers(storage, plan, self._shard_number, self._log)
        records = kept_answers(storage, plan, self._shard_number, self._log)
        self._num_escalated = num_rows - len(records)  # rows without a kept answer are asked again
        return records

    @property
    def _file(self) -> PlannedFile:
        """Return the shard's input file, as planned."""
        return self._folder.plan.files[self._shard.file]

    @property
    def _shard(self) -> Shard:
        """Return the shard, as planned."""
        return self._folder.plan.shards[self._shard_number]

    @contextmanager
    def _reader(self, columns: ColumnChoice) -> Iterator[RowReader]:
        """Borrow a reader of the shard's file that has not read beyond the shard's start.

        Raises InputChanged if the file is not the planned one.
        """
        storage = self._folder.storage
        plan = self._folder.plan
        shard = self._shard
        file = self._file
        key = (file.path, file.size, file.mtime_ns, columns, plan.rows_path(file))

        def open_reader() -> RowReader:
            """Return a new reader. If the file cannot be read because it has changed, the error says so."""
            with unchanged(storage, plan, file):
                return RowReader(storage, plan.rows_path(file), shard, columns)

        # The `unchanged` block ends before the borrowed reader goes back. If `unchanged` raises, the reader is closed.
        # So no other shard gets rows of a file that has changed.
        with (
            self._context.files.reader(key, shard, open_reader) as reader,
            unchanged(storage, plan, file),
        ):
            yield reader
