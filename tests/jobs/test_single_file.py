"""One output file of all rows, written when the last part is there, whatever is killed on the way."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.context import JobContext
from jobs.errors import InvalidValue, PartDamaged
from jobs.parquet import output_file
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.run_folder import RunFolder
from jobs.parquet.storage import Storage
from jobs.runs.output import named_run
from jobs.runs.plans.names import PARTS, part_name
from jobs.runs.plans.spec import RunSpec
from tests.jobs.answering import queued_jobs, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke
from tests.jobs.killing import Fuse
from tests.jobs.test_kills import ROWS, finish, open_work, recover, release_lock, run_until_killed

MakeContext = Callable[[], JobContext]


@pytest.fixture
def source(tmp_path: Path) -> str:
    table = pa.table({"prompt": [f"p{number}" for number in range(ROWS)], "id": range(ROWS)})
    pq.write_table(table.replace_schema_metadata({"own": "kept"}), tmp_path / "in.parquet", row_group_size=2)
    return str(tmp_path / "in.parquet")


def make_spec(source: str, tmp_path: Path, **options: Any) -> RunSpec:
    options = {"sampling": {"temperature": 0}, "rows_per_shard": 2, "single_file": True, **options}
    return RunSpec.from_arguments(source, str(tmp_path / "out"), **options)


def assert_finished(output: Path) -> None:
    files = {"_plan.json", "_manifest.json", "_report.html", "_SUCCESS", "output.parquet", PARTS}
    assert {path.name for path in output.iterdir()} == files
    assert {path.name for path in (output / PARTS).iterdir()} == {part_name(n) for n in range(3)}
    rows = pq.read_table(output / "output.parquet").to_pylist()
    assert [(row["id"], row["completion"]) for row in rows] == [(n, f"P{n}") for n in range(ROWS)]
    assert json.loads((output / "_manifest.json").read_text())["output"] == ["output.parquet"]


RECOVERIES = ("unfinished jobs run again", "planned again without redis")


@pytest.mark.parametrize("seed", [1, 2])
def test_no_kill_leaves_a_run_without_its_file_or_a_mark_before_it(
    redis: Redis, make_context: MakeContext, source: str, tmp_path: Path, seed: int
) -> None:
    """A sample of the points at which an execution may be killed, most of them around the file."""
    spec = make_spec(source, tmp_path)
    output = Path(spec.output)
    assert run_until_killed(make_context(), spec, Fuse(None)) is None
    rng, step = random.Random(seed), 0
    while True:
        redis.flushall()
        shutil.rmtree(spec.output, ignore_errors=True)
        finished = run_until_killed(make_context(), spec, Fuse(step))
        if finished is None:
            break
        if (output / "_SUCCESS").is_file():
            assert pq.read_metadata(output / "output.parquet").num_rows == ROWS
        release_lock(redis, spec)
        recover(redis, make_context, spec, rng.choice(RECOVERIES), finished)
        assert_finished(output)
        step += rng.randint(8, 24) if finished < 2 else rng.randint(1, 5)
    assert step > 60


def test_readers_of_the_folder_and_of_the_file_find_each_row_once(
    redis: Redis, make_context: MakeContext, source: str, tmp_path: Path
) -> None:
    score_parquet(make_context(), source, str(tmp_path / "out"), rows_per_shard=2, single_file=True)
    first, *_ = queued_jobs(redis)
    run_task(make_context(), first.func_name, *first.args)
    assert not (tmp_path / "out" / "output.parquet").exists()
    work_off(redis, make_context)
    assert len(pd.read_parquet(tmp_path / "out")) == ROWS
    assert pl.read_parquet(f"{tmp_path}/out/*.parquet").height == ROWS
    schema = pq.read_schema(tmp_path / "out" / "output.parquet")
    assert schema.metadata == {b"own": b"kept"}
    _, output = named_run(redis, str(tmp_path / "out"))
    assert output is not None
    assert (output.parts, output.finished, output.num_gone) == (3, True, 0)


def test_a_file_that_was_removed_is_written_again_without_computing_a_row(
    redis: Redis, make_context: MakeContext, source: str, tmp_path: Path
) -> None:
    arguments = {"rows_per_shard": 2, "single_file": True, "sampling": {"temperature": 0}}
    score_parquet(make_context(), source, str(tmp_path / "out"), **arguments)
    work_off(redis, make_context)
    assert score_parquet(make_context(), source, str(tmp_path / "out"), **arguments)["already_finished"]
    (tmp_path / "out" / "output.parquet").unlink()
    again = score_parquet(make_context(), source, str(tmp_path / "out"), **arguments)
    assert (again["shards_missing"], again["shards_enqueued"], again["run_finished"]) == (0, 0, True)
    assert_finished(tmp_path / "out")


def test_whoever_was_frozen_while_it_wrote_the_file_replaces_nothing(
    redis: Redis, make_context: MakeContext, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a part was lost, the end withdrawn, the part computed again, and the run ended."""
    spec = make_spec(source, tmp_path)
    storage = Storage(make_context().data_roots)
    plan_run(make_context(), storage, spec, Submission("bulk"))
    write = output_file.write_output
    published: list[int] = []

    def frozen(*arguments: Any) -> bool:
        monkeypatch.setattr("jobs.parquet.run_folder.write_output", write)
        monkeypatch.setattr(RunFolder, "_remove_leftovers", lambda folder: None)  # killed before it could
        written = write(*arguments)
        (Path(spec.output) / PARTS / part_name(1)).unlink()
        plan_run(make_context(), storage, spec, Submission("bulk"))
        finish(open_work(make_context(), spec, 1, storage))
        published.append((Path(spec.output) / "output.parquet").stat().st_ino)
        return written

    monkeypatch.setattr("jobs.parquet.run_folder.write_output", frozen)
    for shard in range(3):
        finish(open_work(make_context(), spec, shard, storage))
    assert [(Path(spec.output) / "output.parquet").stat().st_ino] == published
    assert_finished(Path(spec.output))


def test_a_part_whose_pages_are_damaged_is_named_and_leaves_no_mark(
    redis: Redis, make_context: MakeContext, source: str, tmp_path: Path
) -> None:
    spec = make_spec(source, tmp_path)
    storage = Storage(make_context().data_roots)
    plan_run(make_context(), storage, spec, Submission("bulk"))
    finish(open_work(make_context(), spec, 0, storage))
    part = Path(spec.output) / PARTS / part_name(0)
    content = bytearray(part.read_bytes())
    content[4:200] = b"\xff" * 196
    part.write_bytes(content)
    finish(open_work(make_context(), spec, 1, storage))
    with pytest.raises(PartDamaged, match=part_name(0)):
        finish(open_work(make_context(), spec, 2, storage))
    assert not (Path(spec.output) / "_SUCCESS").exists()
    assert not (Path(spec.output) / "output.parquet").exists()


def test_a_run_without_rows_has_a_file_with_its_columns(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    score_parquet(make_context(), f"{tmp_path}/in.parquet", f"{tmp_path}/out", single_file=True)
    assert pq.read_table(tmp_path / "out" / "output.parquet").column_names[:2] == ["prompt", "completion"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "arrow", "parquet"])
def test_each_format_holds_all_columns(
    redis: Redis, make_context: MakeContext, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    pq.write_table(table, tmp_path / "in.parquet")
    output = tmp_path / "out"
    score_parquet(make_context(), f"{tmp_path}/in.parquet", str(output), single_file=kind, rows_per_shard=2)
    work_off(redis, make_context)
    path = output / f"output.{kind}"
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


def test_a_wrong_wish_is_refused_by_name(source: str, tmp_path: Path, invoke: Invoke) -> None:
    with pytest.raises(InvalidValue, match="single_file is 'xml', expected true, false, or one of parquet"):
        make_spec(source, tmp_path, single_file="xml")
    assert (
        make_spec(source, tmp_path, single_file=False).run
        == make_spec(source, tmp_path, single_file=None).run
    )
    result = invoke("submit", source, tmp_path / "out", "--output-format", "csv")
    assert "add --single-file" in result.output
    assert "--single-file" in invoke("submit", "--help").output


def test_the_command_line_asks_for_one_file(
    redis: Redis, make_context: MakeContext, source: str, tmp_path: Path, invoke: Invoke
) -> None:
    invoke("submit", source, tmp_path / "out", "--single-file", "--output-format", "csv")
    work_off(redis, make_context)
    work_off(redis, make_context)
    assert len(pd.read_csv(tmp_path / "out" / "output.csv")) == ROWS
