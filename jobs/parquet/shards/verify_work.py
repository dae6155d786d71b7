"""Rows of a finished run that are asked once more, and compared with what its parts hold of them."""

import math
import re
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.errors import InvalidJob, InvalidValue
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.asks.row_keys import model_mark
from jobs.parquet.files.fingerprint import unchanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import converted_for_now
from jobs.parquet.outputs.output_file import part_rows
from jobs.parquet.outputs.part import read_part_stats
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.reuse.old_runs import read_keys
from jobs.parquet.shards.row_items import row_runner
from jobs.parquet.shards.rows_task import RowsTask, check_model, trusted_plan
from jobs.parquet.shards.shard_texts import ShardTexts, rendered_shards
from jobs.parquet.tables.columns import holds
from jobs.runs.plans.plan import Plan

#: Answers that are held: a row has `n` of them, or one for each label. Differences that are told.
MAX_ANSWERS, MAX_DIFFERENCES = 100_000, 20
#: Follows what else is computed at the time.
_NOT_COMPARED = {"cached_tokens", "probability", "margin"}


class VerifyWork(RowsTask):
    """A sample of a run; rows that it could not answer, or took from another model, are left out."""

    def __init__(
        self, context: JobContext, run: str, plan: str, sample: int | str = "1%", seed: int = 0
    ) -> None:
        """Read the rows and what the run has of them. sample: "1%" (at least one row), 20 or "20"; seed: which."""
        storage = Storage.of(context)
        self._plan = planned = trusted_plan(context, storage, plan, run)
        if not kind_of(planned.spec).is_compared(planned.spec):
            raise InvalidJob(
                f"run {run} cannot be verified: lines of batch files, and embeddings, are not compared"
            )
        if planned.spec.only_new or planned.spec.order:
            raise InvalidJob(
                f"run {run} cannot be verified: its rows, new or sorted ones, are gone with its end"
            )
        most = MAX_ANSWERS // max(planned.spec.n, len(planned.spec.labels or ()))
        self._num_of_others = 0
        self._sample = sampled_rows(str(sample), f"{run}:{seed}", planned.rows, most)
        fields = [
            field
            for field in kind_of(planned.spec).fields(planned.spec, 0)
            if field.name not in _NOT_COMPARED
        ]
        # Numbers beside tokens or labels stand in structs, those of a map too.
        self._columns = [
            field.name for field in fields if not holds(field.type, pa.types.is_struct)
        ]
        columns = {name: planned.spec.output_prefix + name for name in self._columns}
        self._recorded: dict[int, dict[str, Any]] = {}
        keys: dict[int, bytes] = {}
        for shard in planned.shards_of(self._sample):
            read_part_stats(storage, planned, shard)
            for row, values in part_rows(
                storage, planned, shard, list(columns.values()), self._sample
            ):
                if values[columns["error"]] is None:
                    self._recorded[row] = {name: values[column] for name, column in columns.items()}
            keys |= _keys_of(storage, planned, shard, self._sample)
        self._ask(context, storage, planned, keys)

    def _ask(
        self, context: JobContext, storage: Storage, plan: Plan, keys: Mapping[int, bytes]
    ) -> None:
        """Read the rows that are recorded, to ask them as the run has. keys: of rows, as this model would answer them;
        those that have others are left out. Raises RunOfAnotherModel, RunError or NoRoomYet."""
        check_model(plan, context.model)
        plan.spec.admit(context.checks)
        wanted, ask = self._recorded.keys(), ask_of(plan, context)
        files = {plan.shards[shard].file for shard in plan.shards_of(wanted)}
        self._texts = texts = ShardTexts(
            plan.spec.output, ask.source.columns, context.shard_bytes, "ask fewer rows"
        )
        try:
            with ExitStack() as stack:
                storage, plan = stack.enter_context(converted_for_now(storage, plan, files))
                for number in sorted(files):
                    file = plan.files[number]
                    file = replace(file, path=storage.resolve(file.path))
                    stack.enter_context(unchanged(storage, plan, file))
                for start, rendered in rendered_shards(context, storage, plan, ask.source, wanted):
                    for number, row in enumerate(rendered, start):
                        if number not in wanted:
                            continue
                        if (
                            number in keys
                            and isinstance(row, Row)
                            and ask.key_of(row) != keys[number]
                        ):
                            del self._recorded[number]
                            self._num_of_others += 1
                        elif plan.reused and isinstance(row, Row) and not ask.is_greedy(row):
                            del self._recorded[number]  # its seed may be that of an earlier place
                        else:
                            texts.add([row])
            numbers = list(self._recorded)
            self.runner = row_runner(
                texts.gathered(), ask, context.checks, numbers.__getitem__, let_go=texts.let_go
            )
        except BaseException:
            texts.close()
            raise

    def result(self) -> dict[str, Any]:
        differences = [
            {"row": row, "column": name, "recorded": value, "computed": computed}
            for (row, recorded), answer in zip(
                self._recorded.items(), self.asked.answers(), strict=True
            )
            for name, value in recorded.items()
            if (computed := _plain(answer.column(name))) != value
        ]
        num_different = len({each["row"] for each in differences})
        return {
            "run": self._plan.run,
            "rows": self._plan.rows,
            "rows_checked": len(self._recorded),
            "rows_equal": len(self._recorded) - num_different,
            "rows_different": num_different,
            "rows_not_compared": len(self._sample) - len(self._recorded) - self._num_of_others,
            "rows_of_other_models": self._num_of_others,
            "columns": self._columns,
            "differences": differences[:MAX_DIFFERENCES],
        }


def _keys_of(storage: Storage, plan: Plan, shard: int, rows: Set[int]) -> dict[int, bytes]:
    """Return the keys of a shard's rows that have one, less the run's model, where others have answered some."""
    (found, marks), first = read_keys(storage, plan, shard, plan.run), plan.first_row(shard)
    if np.array_equal(marks, mark := model_mark(plan.model)):
        return {}
    own = found ^ mark
    return {
        row: own[row - first].tobytes()
        for row in rows
        if 0 <= row - first < len(own) and found[row - first].any()
    }


def sampled_rows(sample: str, seed: str, total: int, most: int) -> set[int]:
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)(%?)", sample, re.ASCII)
    if found is None or not (size := Fraction(found[1])):
        raise InvalidValue(
            "sample is {}, expected a share as 1%, or a number of rows from 1", brief(sample)
        )
    count = min(total, math.ceil(size * total / 100 if found[2] else size))
    if count > most:
        raise InvalidValue(
            f"sample has {{}} rows, more than the limit of {most}: take fewer", count
        )
    return set(Random(seed).sample(range(total), count))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
