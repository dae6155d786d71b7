"""Reads a run's folder for a person who looks at its rows, errors and answers. The folder may lie in a store."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa

from jobs.parquet.files.storage import Storage, reading
from jobs.parquet.outputs.examples import examples_of, prompt_columns
from jobs.parquet.outputs.output_file import failed_rows, open_part, part_rows, write_lines_of_parts
from jobs.parquet.outputs.part import answer_names, read_part_stats, without_own_keys
from jobs.parquet.outputs.run_folder import load_plan
from jobs.runs.plans.names import PLAN, SUCCESS, part_shards, row_numbers_name
from jobs.runs.plans.paths import is_stored
from jobs.runs.plans.plan import Plan
from jobs.runs.statistics.report import Examples
from jobs.runs.statistics.run_statistics import Reasons


@dataclass(frozen=True)
class FailedRow:
    """A row with an error. row: its number in the run, from 0. file_row: its number within its file."""

    row: int
    file: str
    file_row: int
    reason: str


#: The time in which a store must answer a person who waits.
STORE_TIMEOUT_S = 30.0


class FolderReader:
    """Reads a run's folder, on this machine or in a store for which the environment has credentials."""

    def __init__(self, folder: str) -> None:
        """Open the run in a folder. Raises PlanDamaged, StoreError, or ImportError without obstore.

        folder: the folder's real path.
        """
        if is_stored(folder):
            # Without obstore, this import raises an ImportError that says what to install. `Storage` would ignore it.
            from jobs.parquet.files import object_files  # noqa: F401
        self._folder = folder
        self._storage = Storage((folder,), timeout_s=STORE_TIMEOUT_S)
        written_plan = load_plan(self._storage, os.path.join(folder, PLAN))
        # A run id depends on the output's path. So if the folder was moved after planning, `self.plan.run` is not the
        # run id that the parts have.
        self.planned_run = written_plan.run
        spec = replace(written_plan.spec, output=folder)
        self.plan: Plan = replace(written_plan, spec=spec)

    def write_batch_lines(self, name: str, sink: Any) -> int:
        """Write the finished lines of an OpenAI batch; return the number of written bytes.

        name: the output file that the lines belong to.
        """
        return write_lines_of_parts(self._storage, self.plan, self.shards(), name, sink)

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self._storage.stat(os.path.join(self._folder, SUCCESS)) is not None

    def text(self, name: str) -> str:
        """Return the text of one of the folder's files."""
        path = os.path.join(self._folder, name)
        with reading(path, "text"), self._storage.open_input(path) as source:
            return str(source.read().decode())

    def shards(self) -> list[int]:
        """Return the shards that have a part, in order."""
        return sorted(self.part_times())

    def part_times(self) -> dict[int, int]:
        """Return the Unix time, in nanoseconds, at which each part was written. The keys are the shards."""
        try:
            written_at = self._storage.written_at(self.plan.spec.parts_folder)
        except FileNotFoundError:  # the folder of parts is made with the first part
            return {}
        names_by_shard = part_shards(written_at)
        return {
            shard: written_at[name]
            for shard, name in names_by_shard.items()
            if shard < len(self.plan.shards)
        }

    @property
    def answer_columns(self) -> list[str]:
        """Return the output's columns of answers and errors, without token counts and log probabilities."""
        return [
            name
            for name in answer_names(self.plan.spec)
            if not name.endswith(("_tokens", "logprobs"))
        ]

    @property
    def prompt_columns(self) -> list[str]:
        """Return the output's columns that the prompts were made of; see examples.prompt_columns."""
        return prompt_columns(self.plan)

    def examples(self, *, has_prompts: bool) -> Examples:
        """Return some rows for the report. has_prompts: whether to return their prompts too. Raises PartDamaged."""
        return examples_of(self._storage, self.plan, has_prompts=has_prompts)

    def table(self) -> pa.Table:
        """Return the rows of all parts, in order. Raises PartDamaged.

        The table keeps the input's metadata, such as the metadata that pandas adds.
        """
        tables = [self.part_table(shard) for shard in range(len(self.plan.shards))]
        schema = without_own_keys(tables[0].schema)
        return pa.concat_tables(table.cast(schema) for table in tables)

    def part_table(self, shard: int) -> pa.Table:
        """Return the rows of a part. Raises PartDamaged."""
        with open_part(self._storage, self.plan, shard) as file:
            return pa.Table.from_batches(file.batches, file.schema).combine_chunks()

    def errors(self, limit: int, cut: bool = False) -> tuple[Reasons, list[FailedRow]]:
        """Return why rows have errors, and the first `limit` of these rows. Raises PartDamaged.

        cut: whether rows whose answer was cut count as rows with an error.
        """
        reasons = Reasons()
        first_failed: list[FailedRow] = []
        for shard in self.shards():
            for failed in self.failed_rows(shard, cut):
                reasons.add(failed.reason, [failed.row])
                if len(first_failed) < limit:
                    first_failed.append(failed)
        return reasons, first_failed

    def failed_rows(self, shard: int, cut: bool = False) -> Iterator[FailedRow]:
        """Yield a part's rows with an error. cut: whether to yield rows with a cut answer too. Raises PartDamaged."""
        for row, reason in failed_rows(self._storage, self.plan, shard, cut):
            input_row = self._input_rows[row]
            # The row's file is the last file that begins at this row or before it.
            file_number = bisect_right(self._first_rows, input_row) - 1
            file_row = input_row - self._first_rows[file_number]
            yield FailedRow(row, self.plan.files[file_number].path, file_row, reason)

    @cached_property
    def _first_rows(self) -> list[int]:
        """Return the index of each file's first row in the whole input, and then the number of all rows."""
        return [0, *accumulate(file.rows for file in self.plan.files)]

    @cached_property
    def _input_rows(self) -> Sequence[int]:
        """Return where each row of the run is in the whole input, counted from 0."""
        # If planning has chosen rows, they all count as rows of the first file; see with_own_rows.
        has_chosen_rows = bool(self.plan.files[0].num_chosen)
        if not has_chosen_rows or self.plan.reused is None:
            return range(self.plan.rows)
        path = os.path.join(self._folder, row_numbers_name(self.plan.reused.name))
        with self._storage.open_input(path) as source:
            return array("q", source.read())

    def bad_answers(self) -> tuple[int, int]:
        """Return how many answers failed their check, and how many were cut at their limit of tokens."""
        failed_checks = 0
        cut = 0
        for shard in self.shards():
            part = read_part_stats(self._storage, self.plan, shard, self.planned_run)
            failed_checks += part.failed_checks
            cut += part.cut
        return failed_checks, cut

    def answers(self, shard: int, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yield a part's rows, with their numbers and the values of some columns."""
        for row, values in part_rows(self._storage, self.plan, shard, columns):
            yield {"row": row, **values}
