"""`--extend`: a run whose input has gained files or rows computes what is new, and is one run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

import jobs as tokenmill
from jobs import errors
from jobs.parquet import inputs
from jobs.parquet.read_back import FolderReader
from jobs.runs.control import submit_run
from jobs.runs.refusals import CannotExtend
from jobs.watch.runs import list_runs
from tests.jobs.answering import (
    FakeCompletion,
    refuse,
    score_parquet,
    shout,
)
from tests.jobs.conftest import Invoke
from tests.jobs.growing_runs import GrowingRun, MakeContext


def test_a_folder_that_gains_files_has_their_rows_behind_those_of_before(growing: GrowingRun) -> None:
    growing.parquet("b.parquet", 1, 2, 3)
    growing.run()
    parts = {path.name: path.read_bytes() for path in growing.output.glob("part-*")}
    growing.parquet("a.parquet", 4, 5, 6)  # sorts before the one that there was
    growing.parquet("c.parquet", 7)
    with pytest.raises(errors.InputChanged, match="--extend"):
        growing.submit()
    assert (growing.output / "_SUCCESS").is_file()
    planned = growing.submit(extend=True)
    assert (planned["rows_added"], planned["shards"], planned["shards_enqueued"]) == (4, 5, 3)
    assert not (growing.output / "_SUCCESS").exists()
    assert list_runs(growing.redis)[0].state == "running"
    growing.work()
    growing.check(1, 2, 3, 4, 5, 6, 7)
    assert {name: (growing.output / name).read_bytes() for name in parts} == parts
    (gained,) = growing.manifest["extensions"]
    assert (gained["files"], gained["rows"], gained["input"]) == (2, 4, [str(growing.input)])
    names = [Path(each["path"]).name for each in growing.manifest["inputs"]]
    assert names == ["b.parquet", "a.parquet", "c.parquet"]
    mark = (growing.output / "_SUCCESS").stat()
    for again in (growing.submit(), growing.submit(extend=True)):
        assert again["already_finished"]
        assert again["shards_enqueued"] == 0
    assert (growing.output / "_SUCCESS").stat() == mark
    growing.parquet("d.parquet", 8)
    growing.extend()
    growing.check(1, 2, 3, 4, 5, 6, 7, 8)
    assert [each["rows"] for each in growing.manifest["extensions"]] == [4, 1]


def test_lines_behind_the_end_of_a_file_are_new_rows(growing: GrowingRun) -> None:
    first = growing.lines("a.jsonl", 1, 2, 3)
    growing.lines("b.jsonl", 4)
    growing.run()
    growing.lines("a.jsonl", 5, 6)
    assert growing.extend() == 2
    growing.check(1, 2, 3, 4, 5, 6)
    growing.lines("a.jsonl", 7)
    growing.lines("b.jsonl", 8, 9, 10)
    assert growing.extend() == 4
    growing.check(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    with first.open("a") as file:
        file.write("\n")  # no row
    assert growing.extend() == 0
    growing.check(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert growing.submit()["already_finished"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("a.jsonl", "file_fingerprint"),
        ("a.jsonl", "scan"),
        ("a.parquet", "file_fingerprint"),
        ("a.parquet", "look_at"),
    ],
)
def test_a_file_that_is_written_to_while_it_is_planned_is_planned_as_it_is_then(
    growing: GrowingRun, monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    real, times = getattr(inputs, step), iter([True])
    is_text = name == "a.jsonl"

    def meanwhile(*args: Any) -> Any:
        if next(times, False):
            _ = growing.lines(name, 2, 3) if is_text else growing.parquet(name, 1, 2, 3)
        return real(*args)

    _ = growing.lines(name, 1) if is_text else growing.parquet(name, 1)
    monkeypatch.setattr(inputs, step, meanwhile)
    growing.run()
    growing.check(1, 2, 3)
    assert growing.extend() == 0
    if is_text:
        growing.lines(name, 4)
        assert growing.extend() == 1
        growing.check(1, 2, 3, 4)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("name", "empty", "line"),
    [
        ("in.csv", "prompt,id\n", "p{0},{0}\n"),
        ("in.tsv", "prompt\tid\n", "p{0}\t{0}\n"),
        ("in.jsonl", "", '{{"prompt": "p{0}", "id": {0}}}\n'),
    ],
)
def test_a_file_of_lines_that_had_no_row_is_computed_once_it_has_some(
    redis: Redis, make_context: MakeContext, tmp_path: Path, name: str, empty: str, line: str, rows: int
) -> None:
    """With the columns that the rows show, as if they had been there from the beginning."""
    template = {"template": "p{file}", "filename_column": "file"} if name == "in.jsonl" else {}
    growing = GrowingRun(redis, make_context, tmp_path, **template)
    (growing.input / name).write_text(empty)
    growing.run()
    (part,) = growing.output.glob("part-*")
    assert (pq.read_metadata(part).num_rows, growing.manifest["rows"]) == (0, 0)
    assert growing.extend() == 0
    with (growing.input / name).open("a") as file:
        file.writelines(line.format(number) for number in range(rows))
    with pytest.raises(errors.InputChanged, match="--extend"):
        growing.submit()
    assert growing.extend() == rows
    assert [row["id"] for row in growing.rows()] == list(range(rows))
    assert [gained["rows"] for gained in growing.manifest["extensions"]] == [rows]
    assert {pq.read_schema(each).field("id").type for each in growing.output.glob("part-*")} == {pa.int64()}
    (found,) = list_runs(redis)
    assert (found.state, found.rows_done, found.rows) == ("finished", rows, rows)
    assert growing.submit()["already_finished"]
    with (growing.input / name).open("a") as file:
        file.write(line.format(rows))
    assert growing.extend() == 1
    assert [row["id"] for row in growing.rows()] == list(range(rows + 1))


def test_rows_keep_their_numbers_and_seeds_where_a_file_before_them_has_grown(growing: GrowingRun) -> None:
    def fails(request: Any) -> FakeCompletion:
        return refuse(f"no {request.sampling['seed']}")

    growing.lines("a.jsonl", 1, 2, 3)
    growing.lines("b.jsonl", 4, 5)
    growing.submit()
    growing.work(lambda request: fails(request) if request.prompt == "p5" else shout(request))
    growing.lines("a.jsonl", 6)
    growing.submit(extend=True)
    growing.work(fails)
    before, after = FolderReader(str(growing.output)).errors(10)[1]
    assert (before.row, before.file_row, Path(before.file).name) == (4, 1, "b.jsonl")
    assert (after.row, after.file_row, Path(after.file).name) == (5, 3, "a.jsonl")
    asked: set[str] = set()

    def noted(request: Any) -> FakeCompletion:
        asked.add(f"no {request.sampling['seed']}")
        return shout(request)

    tokenmill.run(str(growing.output), connection=growing.redis).retry()
    growing.work(noted)
    assert asked == {before.reason, after.reason}
    growing.check(1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "arguments",
    [{"single_file": "jsonl"}, {"labels": ["a", "b"], "sampling": None}],
    ids=["one file", "labels"],
)
def test_runs_of_other_shapes_gain_rows_too(
    redis: Redis, make_context: MakeContext, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    growing = GrowingRun(redis, make_context, tmp_path, **arguments)
    growing.parquet("a.parquet", 1, 2, 3)
    growing.submit()
    growing.work(lambda request: refuse("no"))
    growing.parquet("b.parquet", 4)
    growing.submit(extend=True)
    growing.work(lambda request: refuse("no"))
    assert [(row["id"], row["error"]) for row in growing.rows()] == [(each, "no") for each in (1, 2, 3, 4)]
    assert (growing.manifest["rows"], growing.manifest["errors"]) == (4, 4)
    if "single_file" in arguments:
        lines = (growing.output / "output.jsonl").read_text().splitlines()
        assert [json.loads(line)["id"] for line in lines] == [1, 2, 3, 4]


def test_a_batch_that_gains_lines_writes_its_files_anew(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    named = {"sampling": None, "input_format": "openai-batch", "prompt_column": None}
    growing = GrowingRun(redis, make_context, tmp_path, **named)

    def write(name: str, *ids: str) -> None:
        asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
        lines = [{"custom_id": each, **asked} for each in ids]
        with (growing.input / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def names(name: str) -> list[str]:
        return [json.loads(line)["custom_id"] for line in (growing.output / name).read_text().splitlines()]

    write("b.jsonl", "one", "two")
    growing.run()
    write("b.jsonl", "three", "one")
    write("a.jsonl", "two", "four")
    assert growing.extend() == 4
    assert names("output.jsonl") == ["one", "two", "three", "four"]
    assert names("errors.jsonl") == ["one", "two"]
    write("b.jsonl", "five")
    with pytest.raises(CannotExtend, match="behind the last one"):
        growing.submit(extend=True)


def test_a_longer_list_of_files_is_the_same_run(growing: GrowingRun, invoke: Invoke, tmp_path: Path) -> None:
    first, output = growing.parquet("a.parquet", 1, 2), str(growing.output)
    options = ("--rows-per-shard", "2", "--seed", "1")
    run = invoke("submit", str(first), output, *options).stdout.strip()
    growing.work()
    second = growing.parquet("b.parquet", 3)
    told = invoke("submit", str(first), str(second), output, *options, "--extend")
    assert told.stdout.strip() == run, told.output
    submit_run(growing.redis, "bulk", input=[str(first)], output=output, **growing.arguments)
    growing.work()  # it is extended, as was asked first
    growing.check(1, 2, 3)
    longer = [str(first), str(second)]
    with pytest.raises(errors.InvalidJob, match="as a file of its own"):
        tokenmill.submit(pa.table({"prompt": ["p4"]}), output, connection=growing.redis, extend=True)
    assert "--dry-run looks at all" in invoke("submit", *longer, output, "--dry-run", "--extend").stderr
    with pytest.raises(errors.OutputHoldsAnotherRun, match="--extend"):
        growing.submit(input=longer)
    assert growing.submit(input=[str(first)])["already_finished"]
    growing.redis.flushall()
    growing.output.rename(tmp_path / "away")  # as on a machine that does not see it
    other = submit_run(growing.redis, "bulk", input=longer, output=output, **growing.arguments, extend=True)
    (tmp_path / "away").rename(growing.output)
    assert other != run
    context = replace(growing.make_context(), job_id=f"{other}-plan")
    with pytest.raises(CannotExtend, match="submit it first as it was"):
        score_parquet(context, longer, output, extend=True, **growing.arguments)
