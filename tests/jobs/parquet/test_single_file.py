"""One output file of all rows, written when the last part is there, whatever is killed on the way."""

import csv
import datetime
import decimal
import json
import random
import shutil
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.errors import InvalidValue, PartDamaged
from jobs.parquet.outputs import output_file
from jobs.runs.output import named_run
from jobs.runs.plans.names import PARTS, part_name
from jobs.runs.plans.spec import RunSpec
from tests.jobs.conftest import Invoke
from tests.jobs.killing import RECOVERIES, Executions, Fuse, recover, run_until_killed
from tests.jobs.local_runs import Runs

ROWS = 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    table = pa.table({"prompt": [f"p{number}" for number in range(ROWS)], "id": range(ROWS)})
    pq.write_table(table.replace_schema_metadata({"own": "kept"}), tmp_path / "in.parquet", row_group_size=2)
    return tmp_path / "in.parquet"


class Site(Executions):
    """Of a run of three shards into one file."""

    def check_finished(self) -> None:
        output = self.runs.output
        files = {"_plan.json", "_manifest.json", "_report.html", "_SUCCESS", "output.parquet", PARTS}
        assert {path.name for path in output.iterdir()} == files
        assert {path.name for path in (output / PARTS).iterdir()} == {part_name(n) for n in range(3)}
        rows = pq.read_table(output / "output.parquet").to_pylist()
        assert [(row["id"], row["completion"]) for row in rows] == [(n, f"P{n}") for n in range(ROWS)]
        assert self.runs.manifest["output"] == ["output.parquet"]


@pytest.fixture
def site(runs: Runs, source: Path) -> Site:
    options = {"sampling": {"temperature": 0}, "rows_per_shard": 2, "single_file": True}
    return Site(runs, RunSpec.from_arguments(str(source), str(runs.output), **options))


@pytest.mark.long
def test_no_kill_leaves_a_run_without_its_file_or_a_mark_before_it(redis: Redis, site: Site) -> None:
    """A sample of the points at which an execution may be killed, most of them around the file."""
    output, rng, step = site.runs.output, random.Random(1), 0
    while (finished := run_until_killed(site.runs.context(), site.spec, Fuse(step))) is not None:
        if (output / "_SUCCESS").is_file():
            assert pq.read_metadata(output / "output.parquet").num_rows == ROWS
        recover(redis, site.runs, site.spec, rng.choice(RECOVERIES), finished)
        site.check_finished()
        redis.flushall()
        shutil.rmtree(output)
        step += rng.randint(20, 40) if finished < 2 else rng.randint(2, 6)
    assert step > 60


def test_readers_of_the_folder_and_of_the_file_find_each_row_once(redis: Redis, site: Site) -> None:
    site.plan()
    site.runs.run(site.runs.jobs[0])
    output = site.runs.output
    assert not (output / "output.parquet").exists()
    site.runs.work()
    assert len(pd.read_parquet(output)) == ROWS
    assert pl.read_parquet(f"{output}/*.parquet").height == ROWS
    assert pq.read_schema(output / "output.parquet").metadata == {b"own": b"kept"}
    _, found = named_run(redis, str(output))
    assert found is not None
    assert (found.parts, found.finished, found.num_gone) == (3, True, 0)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "arrow", "parquet"])
def test_each_format_holds_all_columns(runs: Runs, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_file, "GROUP_ROWS", 3)
    rows = 7
    table = pa.table(
        {
            "prompt": ['a "b", c\nd', None, "é", "p", "q", "r", "s"],
            "when": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5)] * rows, pa.timestamp("ns", "UTC")),
            "price": pa.array([decimal.Decimal("1.10")] * rows),
            "tags": [["x", None]] * rows,
            "record": [{"a": 1.5}] * rows,
            "yes": [True] * rows,
            "nan": [float("nan")] * rows,
        }
    )
    pq.write_table(table, runs.source)
    runs.plan(single_file=kind, rows_per_shard=2)
    runs.work()
    path = runs.output / f"output.{kind}"
    names = [*table.column_names, "completion", "finish_reason", "prompt_tokens", "completion_tokens"]
    if kind == "parquet":
        back = pq.read_table(path)
        assert back.select(table.column_names).drop(["nan"]).equals(table.drop(["nan"]))
        assert pq.ParquetFile(path).num_row_groups == 2
        return
    if kind == "arrow":
        assert pa.ipc.open_file(path).read_all().num_rows == rows
        assert pl.read_ipc(path).columns[:11] == names
        return
    if kind == "jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
        first = found[0]
        assert (first["tags"], first["record"], first["nan"]) == (["x", None], {"a": 1.5}, None)
        assert pl.read_ndjson(path).height == rows
    else:
        with path.open(newline="") as file:
            found = list(csv.DictReader(file))
        first = found[0]
        assert (first["tags"], first["yes"], first["nan"]) == ('["x", null]', "true", "")
        assert found[1]["prompt"] == ""
    assert list(first)[:11] == names
    assert first["prompt"] == 'a "b", c\nd'
    assert first["completion"] == 'A "B", C\nD'
    assert (first["when"], first["price"]) == ("2024-01-02 03:04:05.000000000Z", "1.10")
    assert [row["completion"] or None for row in found][1:3] == [None, "É"]


def test_the_command_line_asks_for_one_file(runs: Runs, source: Path, invoke: Invoke) -> None:
    with pytest.raises(InvalidValue, match="single_file is 'xml', expected true, false, or one of parquet"):
        RunSpec.from_arguments(str(source), str(runs.output), single_file="xml")
    assert "add --single-file" in invoke("submit", source, runs.output, "--output-format", "csv").output
    invoke("submit", source, runs.output, "--single-file", "--output-format", "csv")
    for _ in range(2):
        runs.work()
    assert len(pd.read_csv(runs.output / "output.csv")) == ROWS


def test_a_part_whose_pages_are_damaged_is_named_and_leaves_no_mark(site: Site) -> None:
    site.plan()
    first, second, third = site.runs.jobs
    site.runs.run(first)
    site.runs.run(second)
    part = site.runs.output / PARTS / part_name(0)
    content = bytearray(part.read_bytes())
    content[4:200] = b"\xff" * 196
    part.write_bytes(content)
    with pytest.raises(PartDamaged, match=part_name(0)):
        site.runs.run(third)
    assert not (site.runs.output / "_SUCCESS").exists()
