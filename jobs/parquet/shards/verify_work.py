"""Asks rows of a finished run once more, and compares the answers with the answers in its parts."""

import math
import re
from collections.abc import Mapping, Sequence, Set
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
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.asks.row_keys import model_mark, row_keys, whole_keys
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
from jobs.parquet.tables.columns import RowProblem, holds
from jobs.runs.plans.plan import Plan

#: The most answers that are held. A row has `n` answers, or one for each label.
MAX_ANSWERS = 100_000
#: The most differences that a result lists.
MAX_DIFFERENCES = 20
#: Columns that depend on what else is computed at the time.
_NOT_COMPARED = {"cached_tokens", "probability", "margin"}


class VerifyWork(RowsTask):
    """Asks a sample of a run's rows again.

    Rows that the run could not answer, or whose answer another model gave, are left out.
    """

    def __init__(
        self, context: JobContext, run: str, plan: str, sample: int | str = "1%", seed: int = 0
    ) -> None:
        """Read the rows of the sample, and what the run has recorded for them.

        sample: a share such as "1%", which is at least one row; or a number of rows, such as 20 or "20". seed: the seed
        by which rows are chosen.
        Raises InvalidJob, RunOfAnotherModel, RunError or NoRoomYet.
        """
        storage = Storage.of(context)
        self._plan = trusted_plan(context, storage, plan, run)
        spec = self._plan.spec
        if not kind_of(spec).is_compared(spec):
            raise InvalidJob(
                f"run {run} cannot be verified: lines of batch files, and embeddings, are not compared"
            )
        if spec.only_new or spec.order:
            raise InvalidJob(
                f"run {run} cannot be verified: its new or sorted rows were removed when it ended"
            )
        self._columns = []
        for field in kind_of(spec).fields(spec, embedding_size=0):
            # Log probabilities of tokens and probabilities of labels are not compared. They are in structs, or in maps,
            # whose entries are structs in Arrow.
            has_structs = holds(field.type, pa.types.is_struct)
            if field.name not in _NOT_COMPARED and not has_structs:
                self._columns.append(field.name)

        answers_per_row = max(spec.n, len(spec.labels or ()))
        max_rows = MAX_ANSWERS // answers_per_row
        self._sample = sampled_rows(str(sample), f"{run}:{seed}", self._plan.rows, max_rows)
        #: How many rows of the sample another model has answered.
        self._num_other_models = 0
        #: The recorded values of each row that is compared, by the row's number.
        self._recorded: dict[int, dict[str, Any]] = {}
        keys: dict[int, bytes] = {}
        for shard in self._plan.shards_of(self._sample):
            read_part_stats(storage, self._plan, shard)
            self._recorded |= self._recorded_answers(storage, shard)
            keys |= _recorded_keys(storage, self._plan, shard, self._sample)
        self._make_runner(context, storage, self._plan, keys)

    def _recorded_answers(self, storage: Storage, shard: int) -> dict[int, dict[str, Any]]:
        """Return the recorded values of a shard's sampled rows, by row. Rows with an error are left out."""
        prefix = self._plan.spec.output_prefix
        columns = [prefix + name for name in self._columns]
        recorded = {}
        for row, values in part_rows(storage, self._plan, shard, columns, self._sample):
            if values[f"{prefix}error"] is None:
                recorded[row] = {name: values[prefix + name] for name in self._columns}
        return recorded

    def _make_runner(
        self, context: JobContext, storage: Storage, plan: Plan, keys: Mapping[int, bytes]
    ) -> None:
        """Read the rows that are recorded, and make the runner that asks them as the run did.

        keys: by row, the recorded hash of what the run asked and of the model that answered; see _is_comparable.
        Raises RunOfAnotherModel, RunError or NoRoomYet.
        """
        check_model(plan, context)
        plan.spec.admit(context.checks)
        ask = ask_of(plan, context)
        wanted = set(self._recorded)
        file_numbers = {plan.shards[shard].file for shard in plan.shards_of(wanted)}
        self._texts = ShardTexts(
            plan.spec.output, ask.source.columns, context.shard_bytes, "ask fewer rows"
        )
        try:
            with ExitStack() as stack:
                converted = converted_for_now(storage, plan, file_numbers)
                storage, plan = stack.enter_context(converted)
                for file_number in sorted(file_numbers):
                    planned_file = plan.files[file_number]
                    file = replace(planned_file, path=storage.resolve(planned_file.path))
                    stack.enter_context(unchanged(storage, plan, file))
                for start, rows in rendered_shards(context, storage, plan, ask.source, wanted):
                    self._add_rows(start, rows, ask, keys)

            numbers = list(self._recorded)  # in the order of the rows in `_texts`
            self.runner = row_runner(
                self._texts.take_rows(),
                ask,
                context.checks,
                number_of=lambda place: numbers[place],
                let_go=self._texts.let_go,
            )
        except BaseException:
            self._texts.close()
            raise

    def _add_rows(
        self, start: int, rows: Sequence[Row | RowProblem], ask: RowAsk, keys: Mapping[int, bytes]
    ) -> None:
        """Add a shard's recorded rows to the texts. Rows that cannot be compared are removed from `_recorded`.

        start: the number of the shard's first row. keys: by row, the key that the run has recorded.
        """
        assert self._texts is not None
        for number, row in enumerate(rows, start):
            if number not in self._recorded:
                continue
            if self._is_comparable(row, ask, keys.get(number)):
                self._texts.add([row])
            else:
                del self._recorded[number]

    def _is_comparable(
        self, row: Row | RowProblem, ask: RowAsk, recorded_key: bytes | None
    ) -> bool:
        """Whether this model should give the recorded answer. A row that another model has answered is counted.

        recorded_key: a hash of what the run asked for the row and of the model that answered, as the run recorded it.
        None if the run's model has answered the whole shard.
        """
        if isinstance(row, RowProblem):
            # The run could ask this row and has recorded an answer. That it cannot be asked now counts as a difference.
            return True
        if recorded_key is not None:
            keys = row_keys(ask.key_of, [row])
            whole_key = whole_keys(keys, model_mark(self._plan.model))
            if whole_key.tobytes() != recorded_key:
                self._num_other_models += 1
                return False
        # A reused answer may come from a run in which the row had another number, and so another seed.
        return self._plan.reused is None or ask.is_deterministic(row)

    def result(self) -> dict[str, Any]:
        """Return how many rows now got another answer than the run has recorded, and the first differences."""
        differences = []
        different_rows = set()
        answers = self.required_runner.answers()
        for (row, recorded), answer in zip(self._recorded.items(), answers, strict=True):
            for name, value in recorded.items():
                computed = _plain(answer.column(name))
                if computed != value:
                    different_rows.add(row)
                    differences.append(
                        {"row": row, "column": name, "recorded": value, "computed": computed}
                    )
        return {
            "run": self._plan.run,
            "rows": self._plan.rows,
            "rows_checked": len(self._recorded),
            "rows_equal": len(self._recorded) - len(different_rows),
            "rows_different": len(different_rows),
            "rows_not_compared": len(self._sample) - len(self._recorded) - self._num_other_models,
            "rows_of_other_models": self._num_other_models,
            "columns": self._columns,
            "differences": differences[:MAX_DIFFERENCES],
        }


def _recorded_keys(storage: Storage, plan: Plan, shard: int, rows: Set[int]) -> dict[int, bytes]:
    """Return the keys that a run has recorded, by row. Such a key also covers the model that answered the row.

    Returns {} if the run's model has answered all rows of the shard. rows: the rows that are wanted. Rows of other
    shards are left out, and so are rows without a key.
    """
    keys, model_hashes = read_keys(storage, plan, shard, plan.run)
    if np.array_equal(model_hashes, model_mark(plan.model)):
        return {}
    first_row = plan.first_row(shard)
    keys_by_row = {}
    for row in rows:
        number_in_shard = row - first_row
        is_in_shard = 0 <= number_in_shard < len(keys)
        if is_in_shard and keys[number_in_shard].any():
            keys_by_row[row] = keys[number_in_shard].tobytes()
    return keys_by_row


_SAMPLE = re.compile(r"(?P<number>\d{1,12}(?:\.\d{1,9})?)(?P<percent_sign>%?)", re.ASCII)


def sampled_rows(sample: str, seed: str, total: int, max_rows: int) -> set[int]:
    """Return the numbers of random rows. Raises InvalidValue for more than `max_rows` rows.

    sample: how many rows to take, or their share, such as "1%". total: the number of the run's rows.
    """
    match = _SAMPLE.fullmatch(sample)
    if match is None or Fraction(match["number"]) == 0:
        raise InvalidValue(
            "sample is {}, expected a share such as 1%, or a number of rows from 1", brief(sample)
        )
    size = Fraction(match["number"])
    if match["percent_sign"]:
        size = size * total / 100
    count = min(total, math.ceil(size))
    if count > max_rows:
        raise InvalidValue(
            "sample has {} rows, more than the limit of {}: take fewer", count, max_rows
        )
    return set(Random(seed).sample(range(total), count))


def _plain(value: Any) -> Any:
    """Return a value as it is read from Parquet, which has lists in place of tuples."""
    return list(value) if isinstance(value, tuple) else value
