"""A run in the order of its prompts' beginnings: each row once, neighbours share what can be shared."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.context.shared_files import ShardBytes
from jobs.errors import ColumnConflict, InvalidJob, NewRowsGone, ShardTooLarge
from jobs.parquet.outputs.read_back import FolderReader
from tests.jobs.answering import run_task, score_parquet
from tests.jobs.local_runs import Runs
from tests.jobs.runs.test_reuse import BAD, Asked

OPTIONS: dict[str, Any] = {"rows_per_shard": 7, "sampling": {"temperature": 0.0}}
BEGINNINGS = [chr(ord("a") + number) * 300 for number in range(5)]


@pytest.fixture
def prompts() -> list[str | None]:
    found: list[str | None] = [
        f"{beginning}{number}" for number in range(8) for beginning in BEGINNINGS
    ]
    found += [None, BAD, "short"]
    random.Random(3).shuffle(found)
    return found


@pytest.fixture
def folder(runs: Runs, prompts: list[str | None]) -> Path:
    """Two files, whose folders have a value each."""
    for name, part in (("x", prompts[:17]), ("y", prompts[17:])):
        path = runs.source.parent / "in" / f"kind={name}"
        path.mkdir(parents=True)
        pq.write_table(
            pa.table({"prompt": pa.array(part, pa.string())}), path / "0.parquet", row_group_size=5
        )
    return runs.source.parent / "in"


def by_number(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in the input's order, without their numbers."""
    ordered = sorted(rows, key=lambda row: int(row["row_number"]))
    assert [row.pop("row_number") for row in ordered] == list(range(len(rows)))
    return ordered


def test_rows_that_share_a_beginning_are_neighbours_in_the_whole_run(
    runs: Runs, folder: Path
) -> None:
    options = {**OPTIONS, "filename_column": "file"}
    plain = runs.score(folder, Asked(), runs.output.with_name("plain"), **options).to_pylist()
    rows = runs.score(folder, Asked(), order="prefix", **options).to_pylist()
    found = [beginning for beginning, _ in groupby((row["prompt"] or "")[:300] for row in rows)]
    assert len(found) == len(set(found)), "each beginning stands in one place"
    assert by_number(rows) == plain
    assert not (runs.output / "_input").exists()


def test_rows_that_may_get_long_answers_come_first(runs: Runs) -> None:
    runs.write([BEGINNINGS[0], *"bcd"], longest=[3, 9, 200, 100])
    options = {"sampling_columns": {"max_tokens": "longest"}, "order": "prefix"}
    assert runs.score(**options, **OPTIONS)["row_number"].to_pylist() == [2, 3, 1, 0]


def test_one_file_has_the_order_of_the_input(runs: Runs, folder: Path) -> None:
    found = []
    for output, order in ((runs.output, "prefix"), (runs.output.with_name("plain"), None)):
        columns = {"template": "{prompt}{file}", "filename_column": "file", "keep": ["prompt"]}
        runs.plan(folder, output, single_file="jsonl", order=order, **columns, **OPTIONS)
        runs.work(Asked())
        found.append(
            [json.loads(line) for line in (output / "output.jsonl").read_text().splitlines()]
        )
    assert [row.pop("row_number") for row in found[0]] == list(range(43))
    assert found[0] == found[1]


def test_a_failed_row_is_told_as_the_row_of_its_file(
    runs: Runs, folder: Path, prompts: list[str | None]
) -> None:
    runs.score(folder, Asked(), order="prefix", **OPTIONS)
    _, failed = FolderReader(str(runs.output)).errors(9)
    told = {(Path(each.file).parent.name, each.file_row) for each in failed}
    places = [prompts.index(None), prompts.index(BAD)]
    assert told == {("kind=x", at) if at < 17 else ("kind=y", at - 17) for at in places}


def test_lines_that_cannot_be_read_stay_rows(runs: Runs) -> None:
    source = runs.source.with_suffix(".jsonl")
    source.write_text('{"prompt": "b", "id": 1}\nno line\n{"prompt": "a", "id": 2.5}\n')
    plain = runs.score(source, output=runs.output.with_name("plain"), **OPTIONS).to_pylist()
    rows = by_number(runs.score(source, order="prefix", limit=3, **OPTIONS).to_pylist())
    assert rows == plain
    assert "line 2" in rows[1]["error"]
    verify = {"run": runs.manifest["run"], "plan": str(runs.output / "_plan.json")}
    with pytest.raises(InvalidJob, match="new or sorted rows were removed"):
        run_task(runs.context(), "jobs.verify_rows", **verify)


def test_answers_of_a_run_in_another_order_are_reused_both_ways(runs: Runs, folder: Path) -> None:
    outputs = [runs.output, runs.output.with_name("second"), runs.output.with_name("third")]
    for order, output, reuse in zip(
        (None, "prefix", None), outputs, ([], outputs[:1], outputs[1:2]), strict=True
    ):
        asked = Asked()
        runs.score(folder, asked, output, order=order, reuse=list(map(str, reuse)), **OPTIONS)
        assert set(asked.prompts) == {BAD} if reuse else len(asked.prompts) == 42


def test_a_run_goes_on_where_it_was(runs: Runs, folder: Path) -> None:
    runs.plan(folder, order="prefix", **OPTIONS)
    first, *_ = runs.jobs
    runs.run(first)
    runs.plan(folder, order="prefix", **OPTIONS)
    (own,) = (runs.output / "_keys").glob("_rows-*")
    own.with_name("_rows-00000.killed.bin").write_bytes(b"")
    runs.work()
    assert len(by_number(runs.rows())) == 43
    assert [*(runs.output / "_keys").glob("_rows-*")] == [own], (
        "and what a killed planning had chosen is gone"
    )
    unfinished = runs.output.with_name("unfinished")
    runs.plan(folder, unfinished, order="prefix", **OPTIONS)
    for path in (unfinished / "_input").iterdir():
        path.unlink()
    with pytest.raises(NewRowsGone):
        runs.plan(folder, unfinished, order="prefix", **OPTIONS)


@pytest.mark.parametrize("limit", [1 << 20, 1 << 40])
def test_what_a_shard_may_read_is_what_the_worker_says(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("jobs.parquet.tables.table_reading.SHARD_TIMES", 2**-20)
    runs.write(["a", "b"], wide=["x" * 1000] * 2)
    context = replace(runs.context(), shard_bytes=ShardBytes(limit))
    with nullcontext() if limit > 1 << 30 else pytest.raises(ShardTooLarge):
        score_parquet(context, str(runs.source), str(runs.output), order="prefix")


def test_what_cannot_be_is_refused(runs: Runs) -> None:
    runs.write(["a"], row_number=[5])
    with pytest.raises(ColumnConflict, match="row_number"):
        runs.plan(order="prefix")
    with pytest.raises(InvalidJob, match="only_new"):
        runs.plan(order="prefix", only_new=True, reuse="x")
