"""`--extend`: a run whose input has gained files or rows computes what is new, and is one run."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import errors
from jobs.runs.refusals import CannotExtend
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs


class GrowingRun:
    """A folder of input files, and the run of them."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.output = runs, runs.output
        self.input = runs.output.with_name("in")
        self.input.mkdir()

    def parquet(self, name: str, *ids: int) -> None:
        table = pa.table({"prompt": [f"p{each}" for each in ids], "id": ids})
        pq.write_table(table, self.input / name)

    def lines(self, name: str, *ids: int) -> None:
        """Write these rows behind those that are there."""
        with (self.input / name).open("a") as file:
            file.writelines(json.dumps({"prompt": f"p{each}", "id": each}) + "\n" for each in ids)

    def submit(self, **options: Any) -> dict[str, Any]:
        options = {"rows_per_shard": 2, "sampling": {"seed": 1}, **options}
        return self.runs.plan(self.input, **options)

    def run(self, **options: Any) -> dict[str, Any]:
        planned = self.submit(**options)
        self.work()
        return planned

    def work(self) -> None:
        while self.runs.jobs:
            self.runs.work()

    def check(self, *ids: int) -> None:
        """The run has ended with these rows, in this order."""
        assert [(row["id"], row["completion"]) for row in self.runs.rows()] == [(each, f"P{each}") for each in ids]
        assert (self.output / "_SUCCESS").is_file()
        assert self.runs.manifest["rows"] == len(ids)


@pytest.fixture
def growing(runs: Runs) -> GrowingRun:
    return GrowingRun(runs)


def test_a_folder_that_gains_files_has_their_rows_behind_those_of_before(growing: GrowingRun) -> None:
    growing.parquet("b.parquet", 1, 2, 3)
    growing.run()
    parts = {path.name: path.read_bytes() for path in growing.output.glob("part-*")}
    growing.parquet("a.parquet", 4, 5, 6)  # sorts before the one that there was
    with pytest.raises(errors.InputChanged, match="--extend"):
        growing.submit()
    assert (growing.output / "_SUCCESS").is_file()
    planned = growing.run(extend=True)
    assert (planned["rows_added"], planned["shards_enqueued"]) == (3, 2)
    growing.check(1, 2, 3, 4, 5, 6)
    assert {name: (growing.output / name).read_bytes() for name in parts} == parts
    assert growing.submit(extend=True)["already_finished"]


def test_lines_behind_the_end_of_a_file_are_new_rows(growing: GrowingRun) -> None:
    growing.lines("a.jsonl", 1, 2, 3)
    growing.lines("b.jsonl", 4)
    growing.run()
    growing.lines("a.jsonl", 5)
    assert growing.run(extend=True)["rows_added"] == 1
    growing.check(1, 2, 3, 4, 5)


def test_rows_that_were_changed_or_another_run_are_refused(growing: GrowingRun) -> None:
    growing.lines("a.jsonl", 1, 2)
    growing.run()
    path = growing.input / "a.jsonl"
    path.write_text(path.read_text().replace("p1", "p0") + '{"prompt": "p9", "id": 9}\n')
    with pytest.raises(CannotExtend, match="do not show"):
        growing.submit(extend=True)
    with pytest.raises(errors.OutputHoldsAnotherRun, match="different sampling"):
        growing.submit(extend=True, sampling={"seed": 2})
    assert (growing.output / "_SUCCESS").is_file()


def test_the_command_line_extends(growing: GrowingRun, invoke: Invoke) -> None:
    options = (growing.input, growing.output, "--rows-per-shard", 2, "--seed", 1)
    growing.parquet("a.parquet", 1)
    growing.run()
    growing.parquet("b.parquet", 2)
    assert invoke("submit", *options, "--extend").exit_code == 0
    growing.work()
    growing.check(1, 2)
