"""One execution of one shard: reads its rows, publishes its part, ends the run if it was the last."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from jobs.context import JobContext
from jobs.context.answers import Answer, AnswerMemo
from jobs.context.served_model import ServedModel, model_text
from jobs.context.shared_files import ReaderKey, SharedFiles
from jobs.errors import PlanDamaged, RunError, RunOfAnotherModel
from jobs.parquet.files.filesystem import FileStat
from jobs.parquet.files.fingerprint import file_fingerprint, unchanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.part import embedding_size, output_schema, part_stats, with_answers, write_part
from jobs.parquet.outputs.plan_file import load_plan
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.prompts.batch_requests import BatchRequests
from jobs.parquet.prompts.prompt_chain import Chain
from jobs.parquet.prompts.prompt_source import PromptSource, render_rows
from jobs.parquet.prompts.sources import read_source
from jobs.parquet.shards.shard_embeddings import ShardEmbeddings
from jobs.parquet.shards.shard_labels import ShardLabels
from jobs.parquet.shards.shard_requests import ShardRequests
from jobs.parquet.shards.shard_texts import ShardTexts
from jobs.parquet.tables.columns import ColumnChoice, kept, with_added_fields, with_added_values
from jobs.parquet.tables.line_problems import split_problems
from jobs.parquet.tables.row_reader import RowReader
from jobs.parquet.tables.row_values import RowProblem
from jobs.prompts.batch_lines import line_task
from jobs.runs.plans.formats import OPENAI_BATCH
from jobs.runs.plans.names import PLAN
from jobs.runs.plans.plan import Plan, PlannedFile, Shard
from jobs.runs.redis_state.state import RunState
from jobs.runs.statistics.part_stats import PartStats
from jobs.tasks import Completion, OpenTask, Request


class ShardWork(OpenTask):
    """A shard between open and close. With its part already there it has no requests and only counts it."""

    def __init__(
        self,
        context: JobContext,
        folder: RunFolder,
        shard: int,
        redo_damaged: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the shard's rows. Raises RunError or NoRoomYet.

        redo_damaged: a part that is not what this run has written is replaced. clock: Unix time in seconds.
        """
        self._folder, self._number, self._redo, self._clock = folder, shard, redo_damaged, clock
        self._model, self._queue = context.model, context.queue_name
        self._started_at = clock()
        temporary = folder.temporary_replacement if redo_damaged else folder.temporary_part
        self._temporary = temporary(shard)
        self._requests: ShardRequests | BatchRequests | None = None
        self._context = context
        self._files, self._entered = context.files, False
        self._memo, self._held = context.answers, context.shard_bytes
        self._check_interrupted, self._check_sampling = context.check_interrupted, context.check_sampling
        self._texts: ShardTexts | None = None
        folder.state.begin(self._started_at)
        if not self._has_part():
            check_model(folder.plan, context.model)
            context.checks.admit(folder.plan.spec.repairs)
            self._held.check_room()
            self._files.enter(self._planned_file.path)
            self._entered = True
            try:
                self._requests = self._read_requests()
            except BaseException:
                self._leave()
                self._let_go()
                raise

    @classmethod
    def open(
        cls, context: JobContext, run: str, plan_path: str, shard: int, redo_damaged: bool = False
    ) -> ShardWork:
        """Find the shard in its plan. Raises PlanDamaged when the three do not belong together."""
        storage = Storage.of(context)
        plan = trusted_plan(storage, plan_path, run, context.files)
        if shard >= len(plan.shards):
            raise PlanDamaged(plan_path, f"it has {len(plan.shards)} shards, none numbered {shard}")
        state = RunState(context.connection, run)
        return cls(context, RunFolder(storage, plan, state, context.execution_id), shard, redo_damaged)

    def requests(self) -> Iterator[Request]:
        return self._requests.requests() if self._requests else iter(())

    @property
    def num_requests(self) -> int | None:
        return self._requests.num_requests if self._requests else 0

    @property
    def has_more(self) -> bool:
        return self._requests is not None and self._requests.has_more

    @property
    def inspects(self) -> bool:
        return self._requests is not None and self._requests.inspects

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        assert self._requests is not None, "inspected without a request"
        self._requests.inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        assert self._requests is not None, "delivered without a request"
        self._requests.deliver(index, completions)

    def progress(self) -> dict[str, Any]:
        """Return rows of the shard, rows done and being answered; and of the rows that this execution has
        answered, the tokens of their prompts and those generated."""
        rows = self._shard.rows
        if self._requests is None:
            return {"rows": rows, "rows_done": rows, "rows_open": 0, "prompt_tokens": 0, "tokens": 0}
        return {
            "rows": rows,
            "rows_done": self._requests.rows_done,
            "rows_open": self._requests.rows_open,
            "prompt_tokens": self._requests.prompt_tokens,
            "opened_at": self._started_at,
            "tokens": self._requests.generated_tokens,
        }

    def result(self) -> dict[str, Any]:
        """Publish the part unless one is there, count it, and end the run if it was the last one.

        Raises RunError.
        """
        stats = self._publish(self._requests) if self._requests else None
        if stats is None:  # another execution was first: its part counts, not ours
            stats = self._folder.part_stats(self._number)
        ended = self._folder.record_part(stats, self._queue)
        return {
            "run": stats.run,
            "shard": stats.shard,
            "rows": stats.rows,
            "errors": stats.errors,
            "rows_unasked": None if self._requests is None else self._requests.rows_unasked,
            "tokens": stats.completion_tokens,
            "run_finished": ended,
        }

    def close(self) -> None:
        self._leave()
        if self._requests is not None:
            self._requests.close()
        self._let_go()
        self._folder.storage.delete(self._temporary)

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            self._files.leave(self._planned_file.path)

    def _has_part(self) -> bool:
        """Whether there is nothing left to compute."""
        if self._redo:
            return self._folder.has_whole_part(self._number)
        return self._folder.has_part(self._number)

    def _let_go(self) -> None:
        texts, self._texts = self._texts, None
        if texts is not None:
            texts.close()

    def _publish(self, requests: ShardRequests | BatchRequests) -> PartStats | None:
        """Write and publish the part; return None when the place was taken."""
        while not self._has_part():  # redone while this worker was frozen: nobody awaits the file
            try:
                stats = self._write(requests)
                if self._redo:
                    published = self._folder.publish_over_damaged(self._temporary, self._number)
                else:
                    published = self._folder.publish(self._temporary, self._number)
            except (OSError, RunError):
                # Of two executions the slower one may find the run ended and its own file, or the input,
                # removed.
                if not self._has_part():
                    raise
                return None
            if published:
                return stats
            if not self._redo or self._folder.storage.stat(self._temporary) is not None:
                return None
            self._check_interrupted()  # whoever thawed has removed the file, and perhaps replaced nothing
        return None

    def _write(self, requests: ShardRequests | BatchRequests) -> PartStats:
        """Write the part beside its place."""
        storage, file = self._folder.storage, self._file()
        answers = requests.answers()
        stats = part_stats(
            self._folder.plan.run,
            self._number,
            answers,
            generated_tokens=requests.generated_tokens,
            times=(self._started_at, self._clock()),
            model=self._model,
            worker=self._context.worker_name,
        )
        spec, added = self._folder.plan.spec, self._folder.plan.added_columns
        self._folder.make_parts_folder()
        with self._reader(file, kept(spec, self._added)) as reader:
            size = embedding_size(spec, self._model)
            schema = output_schema(with_added_fields(reader.schema, added), spec, file.path, size)
            write_part(storage, self._temporary, schema, self._batches(reader, answers, schema), stats)
        return stats

    def _batches(
        self, reader: RowReader, answers: list[Answer], schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in reader.read(self._shard, self._check_interrupted):
            batch = self._with_added(split_problems(batch)[0])
            yield with_answers(batch, answers[start : start + batch.num_rows], schema, self._folder.plan.spec)
            start += batch.num_rows

    def _read_requests(self) -> ShardRequests | BatchRequests:
        plan, file = self._folder.plan, self._file()
        source = self._source
        in_file = ColumnChoice(tuple(name for name in source.columns if name not in self._added))
        self._texts = texts = ShardTexts(file.path, source.columns, self._held)
        with self._reader(file, in_file) as reader:
            for batch in reader.read(self._shard, self._check_interrupted):
                batch, problems = split_problems(batch)
                texts.add(self._heeded(render_rows(source, self._with_added(batch), problems)))
        first_row = plan.first_row(self._number)
        if plan.input_format == OPENAI_BATCH:
            return self._batch_requests(texts, first_row)
        return shard_requests(
            self._context,
            plan,
            source,
            texts.gathered(),
            lambda row: first_row + row,
            self._memo,
            texts.let_go,
        )

    def _batch_requests(self, texts: ShardTexts, first_row: int) -> BatchRequests:
        """Return the requests of lines that each are a job of their own."""
        plan, context = self._folder.plan, self._context

        def open_task(row: int, line: Any) -> OpenTask:
            number = first_row + row
            own = replace(context, job_id=f"{plan.run}-{number}")
            aliases = plan.spec.model_alias or ()
            return line_task(line, row_seed(plan.seed, number), aliases).open(own)

        rows = texts.gathered()
        repeated = bisect_left(plan.repeated, first_row), bisect_left(plan.repeated, first_row + len(rows))
        for number in plan.repeated[slice(*repeated)]:
            if isinstance(rows[number - first_row], str):
                rows[number - first_row] = RowProblem(
                    "an earlier line has this custom_id: name each line once"
                )
        return BatchRequests(rows, open_task, texts.let_go)

    def _heeded(self, rows: Iterator[str | RowProblem]) -> Iterator[str | RowProblem]:
        """Yield rows; before each of them the work heeds what interrupts it."""
        for row in rows:
            self._check_interrupted()
            yield row

    def _with_added(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return with_added_values(batch, self._folder.plan.added_columns, self._planned_file.values)

    @property
    def _planned_file(self) -> PlannedFile:
        return self._folder.plan.files[self._shard.file]

    @cached_property
    def _source(self) -> PromptSource:
        return read_source(self._folder.plan.spec, self._check_sampling)

    @property
    def _added(self) -> set[str]:
        return {column.name for column in self._folder.plan.added_columns}

    @property
    def _shard(self) -> Shard:
        return self._folder.plan.shards[self._number]

    @contextmanager
    def _reader(self, file: PlannedFile, columns: ColumnChoice) -> Iterator[RowReader]:
        """Borrow a reader that has not passed this shard; another shard may go on with it.

        Raises InputChanged when the file is not the one that was planned, or no longer when the body ends.
        """
        plan, storage, shard = self._folder.plan, self._folder.storage, self._shard
        key = ReaderKey(self._planned_file.path, (file.size, file.mtime_ns), (columns, plan.rows_path(file)))

        def open_reader() -> RowReader:
            make_room = self._files.close_idle
            return RowReader(storage, plan.rows_path(file), shard, columns, self._held, make_room=make_room)

        def fingerprint(state: FileStat) -> str:
            return self._files.fingerprint(key.path, state, lambda: file_fingerprint(storage, file.path))

        # The outer one explains why a reader could not open; by the inner one a reader that has seen another
        # file is closed, and not lent on to a shard that finds the planned file in its place again.
        with (
            unchanged(storage, plan, file, fingerprint),
            self._files.reader(key, shard, open_reader) as reader,
            unchanged(storage, plan, file, fingerprint),
        ):
            yield reader

    def _file(self) -> PlannedFile:
        """The shard's file, confined anew: a plan is a file that someone may have edited."""
        file = self._planned_file
        return replace(file, path=self._folder.storage.resolve(file.path))


def shard_requests(
    context: JobContext,
    plan: Plan,
    source: PromptSource,
    rows: Sequence[str | RowProblem],
    row_number: Callable[[int], int],
    memo: AnswerMemo,
    let_go: Callable[[str], None],
) -> ShardRequests:
    """Return what a run asks for rendered rows. row_number: of a row among them, its number in the run.

    source: what has rendered them. memo, let_go: as of ShardRequests.
    """
    spec = plan.spec
    sampling, chat = spec.chat
    return ShardRequests(
        rows,
        sampling,
        lambda row: row_seed(plan.seed, row_number(row)),
        source.is_chat,
        plan.run,
        memo,
        let_go,
        spec.n,
        chat.template,
        bool(spec.sampling_columns),
        chat.has_tools,
        Chain(spec.steps, spec.defaults) if spec.steps else None,
        ShardLabels.of(spec, source) or ShardEmbeddings.of(spec),
        spec.repairs,
        context.checks,
    )


def check_model(plan: Plan, served: ServedModel) -> None:
    """Raise RunOfAnotherModel. A BatchWorker leaves such a shard on its queue; a stock worker takes any."""
    if plan.model.fingerprint != served.fingerprint:
        found = model_text(served.name, served.dtype, served.fingerprint)
        raise RunOfAnotherModel(plan.run, str(plan.model), f"{found}, which is served here")


def trusted_plan(storage: Storage, plan_path: str, run: str, files: SharedFiles) -> Plan:
    """Read the plan that a job names. Raises PathOutsideRoots or PlanDamaged when it is not this run's."""
    path = storage.resolve(plan_path)
    plan = files.plan((path, storage.stat(path)), lambda: load_plan(storage, path))
    if plan.run != run:
        raise PlanDamaged(path, f"it belongs to run {plan.run}, the job to {run}")
    if path != os.path.join(plan.spec.output, PLAN):
        raise PlanDamaged(path, f"it was written for {plan.spec.output}")
    return plan


def row_seed(run_seed: int, row: int) -> int:
    """Return a row's seed: the same on every worker and in every attempt; 0 to 2**63 - 1."""
    digest = blake2b(f"{run_seed}:{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
