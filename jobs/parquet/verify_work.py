"""Rows of a finished run that are asked once more, and compared with what its parts hold of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ..context import JobContext
from ..context.answer import Answer
from ..context.answer_memo import AnswerMemo
from ..errors import CannotVerify, PartDamaged, ShardTooLarge
from ..runs.embedding_options import EMBED
from ..runs.formats import OPENAI_BATCH
from ..runs.label_options import MAX_PROBABILITIES
from ..runs.plan import PlannedFile
from ..runs.row_sample import MAX_ROWS, RowSample
from ..runs.spec import MAX_ROWS_PER_SHARD, RunSpec
from ..runs.state import RunState
from .filesystem import FileStat
from .fingerprint import file_fingerprint
from .inputs import unchanged
from .output_file import BATCH_ROWS, open_part
from .part import answer_fields
from .prompt_source import PromptSource
from .rendered import rendered_shards
from .row_values import RowProblem
from .rows_task import RowsTask
from .run_folder import RunFolder
from .shard_requests import ShardRequests
from .shard_texts import ShardTexts
from .shard_work import check_model, shard_requests, trusted_plan
from .sources import read_source
from .storage import Storage

#: Of what differs: how much is told, and how much of each value.
MAX_DIFFERENCES, MAX_VALUE_CHARS = 20, 200

#: Of a longer value, what is told from before the first character that differs.
CHARS_BEFORE = 40

#: Follows what else was computed at the time, and says nothing of the answer.
_NOT_COMPARED = "cached_tokens"


class VerifyWork(RowsTask):
    """A sample of a run between open and close.

    Compared are texts, reasons and counts of tokens; numbers with fractions (probabilities) are not: their
    last digits follow what is computed beside a row. Rows that the run could not answer are left out.
    """

    def __init__(self, context: JobContext, run: str, plan_path: str, sample: RowSample, seed: int) -> None:
        """Read the rows and what the run has of them. Raises RunError, InvalidValue or NoRoomYet."""
        storage = Storage.of(context)
        plan = trusted_plan(storage, plan_path, run, context.files)
        files = tuple(replace(file, path=storage.resolve(file.path)) for file in plan.files)
        self._plan = plan = replace(plan, files=files)
        self._context, self._storage = context, storage
        self._folder = RunFolder(storage, plan, RunState(context.connection, run), context.execution_id)
        self._check()
        fields = [field for field in answer_fields(plan.spec) if _is_compared(field)]
        self._columns = [field.name for field in fields]
        rows = sample.rows(run, plan.rows, seed, _most_rows(plan.spec))
        self._recorded = self._read_parts(set(rows))
        self._rows = [row for row in rows if self._recorded[row]["error"] is None]
        self._num_failed = len(rows) - len(self._rows)
        source = read_source(plan.spec, context.check_sampling)
        self._texts = ShardTexts("", source.columns, context.shard_bytes)
        try:
            self._requests = self._read_requests(source)
        except BaseException:
            self._texts.close()
            raise

    def progress(self) -> dict[str, Any]:
        """Return rows of the sample, rows done, and tokens generated."""
        done, tokens = self._requests.rows_done, self._requests.generated_tokens
        return {"rows": len(self._rows), "rows_done": done, "tokens": tokens}

    def result(self) -> dict[str, Any]:
        """Return how many rows are equal, and where the first ones that are not differ."""
        differences: list[dict[str, Any]] = []
        num_different = 0
        for row, answer in zip(self._rows, self._requests.answers(), strict=True):
            found = self._differences(row, answer)
            num_different += bool(found)
            differences += found[: MAX_DIFFERENCES - len(differences)]
        return {
            "run": self._plan.run,
            "rows": self._plan.rows,
            "rows_checked": len(self._rows),
            "rows_equal": len(self._rows) - num_different,
            "rows_different": num_different,
            "rows_not_compared": self._num_failed,
            "columns": self._columns,
            "differences": differences,
        }

    def _check(self) -> None:
        """Raise CannotVerify, RunOfAnotherModel or what a check that is not allowed here does."""
        plan, spec = self._plan, self._plan.spec
        if plan.input_format == OPENAI_BATCH:
            raise CannotVerify(plan.run, "its lines are jobs of their own (openai-batch), not rows of a run")
        if spec.task == EMBED:
            raise CannotVerify(
                plan.run, "embeddings are numbers whose last digits follow what is computed beside them"
            )
        if not self._folder.has_success() or (missing := self._folder.missing_shards()):
            gone = f", {len(missing)} of its parts are gone" if self._folder.has_success() else ""
            raise CannotVerify(plan.run, f"it is not finished{gone}: submit it again, then verify")
        check_model(plan, self._context.model)
        self._context.checks.admit(spec.repairs)

    def _read_parts(self, rows: Set[int]) -> dict[int, dict[str, Any]]:
        """Return what the run has of rows: the values of the compared columns. Raises PartDamaged."""
        found: dict[int, dict[str, Any]] = {}
        prefix = self._plan.spec.output_prefix
        names = [prefix + name for name in self._columns]
        for number in range(len(self._plan.shards)):
            if not self._holds(number, rows):
                continue
            start = self._plan.first_row(number)
            self._folder.part_stats(number)  # raises for one that is not this shard's
            with open_part(self._storage, self._plan, number) as file:
                if absent := [name for name in names if name not in file.schema_arrow.names]:
                    raise PartDamaged(self._folder.part_path(number), f"it has no column {absent[0]!r}")
                for batch in file.iter_batches(BATCH_ROWS, columns=names, use_threads=False):
                    self._context.check_interrupted()
                    for place in (each for each in range(batch.num_rows) if start + each in rows):
                        (values,) = batch.select(names).slice(place, 1).to_pylist()
                        found[start + place] = dict(zip(self._columns, map(values.get, names), strict=True))
                    start += batch.num_rows
        return found

    def _read_requests(self, source: PromptSource) -> ShardRequests:
        """Ask the rows as the run has, from files that are still those that were planned.

        Raises RunError or NoRoomYet.
        """
        wanted = set(self._rows)
        with ExitStack() as stack:
            for file in self._files_of(wanted):
                stack.enter_context(unchanged(self._storage, file, self._fingerprint(file)))
            for start, rows in rendered_shards(self._context, self._storage, self._plan, source, wanted):
                self._add(rows[number] for number in range(len(rows)) if start + number in wanted)
        return shard_requests(
            self._context,
            self._plan,
            source,
            self._texts.gathered(),
            self._rows.__getitem__,
            AnswerMemo(0),  # what the run has left in this process would answer for the engine
            self._texts.let_go,
        )

    def _add(self, rows: Iterable[str | RowProblem]) -> None:
        try:
            self._texts.add(rows)
        except ShardTooLarge:
            limit = self._context.shard_bytes.limit
            raise CannotVerify(
                self._plan.run, f"the sample's prompts take more than the limit of {limit} bytes: take fewer"
            ) from None

    def _files_of(self, rows: Set[int]) -> list[PlannedFile]:
        numbers = {shard.file for number, shard in enumerate(self._plan.shards) if self._holds(number, rows)}
        return [self._plan.files[number] for number in sorted(numbers)]

    def _holds(self, shard: int, rows: Set[int]) -> bool:
        start = self._plan.first_row(shard)
        return not rows.isdisjoint(range(start, start + self._plan.shards[shard].rows))

    def _fingerprint(self, file: PlannedFile) -> Callable[[FileStat], str]:
        return lambda state: file_fingerprint(self._storage, file.path, self._plan.input_format)

    def _differences(self, row: int, answer: Answer) -> list[dict[str, Any]]:
        found = []
        for column, recorded in self._recorded[row].items():
            value = answer.column(column)
            computed = list(value) if isinstance(value, tuple) else value
            if computed != recorded:
                texts = told(recorded, computed)
                found.append({"row": row, "column": column, "recorded": texts[0], "computed": texts[1]})
        return found


def told(recorded: Any, computed: Any) -> tuple[Any, Any]:
    """Return two values as they are told: of long ones, what is around the first character that differs."""
    one, other = (
        json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
        for value in (recorded, computed)
    )
    start = 0
    if isinstance(one, str) and isinstance(other, str):
        pairs = enumerate(zip(one, other, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
        if max(len(one), len(other)) > MAX_VALUE_CHARS:
            start = max(0, shared - CHARS_BEFORE)
    first, second = (
        value[start : start + MAX_VALUE_CHARS] if isinstance(value, str) else value for value in (one, other)
    )
    return first, second


def _most_rows(spec: RunSpec) -> int:
    """Return how many rows of a run may be asked at once, whose answers are all held."""
    held = MAX_PROBABILITIES // len(spec.labels) if spec.labels else MAX_ROWS_PER_SHARD // spec.n
    return min(MAX_ROWS, held)


def _is_compared(field: pa.Field) -> bool:
    is_exact: bool = pa.types.is_string(field.type) or pa.types.is_integer(field.type)
    return is_exact and field.name != _NOT_COMPARED
